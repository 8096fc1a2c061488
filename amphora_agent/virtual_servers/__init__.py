# SPDX-License-Identifier: Apache-2.0
"""Listeners that HAProxy does not serve: UDP and SCTP."""
