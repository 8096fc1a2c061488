# SPDX-License-Identifier: Apache-2.0
"""The daemon that checks members, sets the forwarding engine, and writes the flow log."""
