# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP listeners: model, counters, event loop and kernel messages of the L4 daemon."""
