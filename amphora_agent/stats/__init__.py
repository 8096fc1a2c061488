# SPDX-License-Identifier: Apache-2.0
"""Statistics and member states of HAProxy and the L4 daemon, and the heartbeats that report them."""
