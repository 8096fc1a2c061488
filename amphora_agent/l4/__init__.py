# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP listeners: their model, counters, and the event loop and kernel messages of the checker."""
