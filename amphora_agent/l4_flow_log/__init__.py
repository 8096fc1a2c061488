# SPDX-License-Identifier: Apache-2.0
"""The log of flows of UDP and SCTP listeners, from conntrack events."""
