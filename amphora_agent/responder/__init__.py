# SPDX-License-Identifier: Apache-2.0
"""The responder: a daemon that gives HAProxy the metrics for scrapers and the results of pings."""

# `amphora_agent.source_checksum` computes the responder's version from these source files. A unit test compares the
# list with the responder's imports.
PACKAGES = ("responder",)
_SUMS = ("stats/__init__.py", "stats/former_workers.py")
_NETWORK = ("network/__init__.py", "network/icmp_echo.py")
ELSEWHERE = ("__init__.py", "errors.py", "haproxy/__init__.py", "haproxy/runtime_socket.py", *_NETWORK, *_SUMS)
