# SPDX-License-Identifier: Apache-2.0
"""The daemon that checks members, sets the forwarding engine, and writes the flow log."""

# Packages and files whose checksum is the L4 daemon's version (`amphora_agent.source_checksum`). A unit test compares
# this list with the daemon's imports.
PACKAGES = ("l4", "l4_checks", "l4_daemon", "l4_flow_log", "l4_nftables")
_NETWORK = ("network/__init__.py", "network/libnftables.py", "network/icmp_echo.py")
ELSEWHERE = ("__init__.py", "errors.py", "log_settings.py", *_NETWORK)
