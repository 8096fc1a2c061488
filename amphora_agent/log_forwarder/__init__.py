# SPDX-License-Identifier: Apache-2.0
"""The log forwarder: a process that sends log lines to targets, and the agent's side of it."""

# Sources of the daemon for `source_checksum`. A unit test compares them with its imports.
PACKAGES = ("log_forwarder",)
ELSEWHERE = ("__init__.py", "log_settings.py", "services/__init__.py", "services/output_lines.py")
