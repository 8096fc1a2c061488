# SPDX-License-Identifier: Apache-2.0
"""The daemon that checks members, sets the forwarding engine, and writes the flow log."""

# Sources of the daemon for `amphora_agent.source_checksum`. A unit test compares them with its imports.
PACKAGES = ("l4", "l4_checks", "l4_daemon", "l4_flow_log", "l4_nftables")
_NETWORK = ("network/__init__.py", "network/libnftables.py", "network/icmp_echo.py")
ELSEWHERE = ("__init__.py", "errors.py", "log_settings.py", *_NETWORK)
