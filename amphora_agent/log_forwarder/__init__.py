# SPDX-License-Identifier: Apache-2.0
"""The log forwarder: a process that sends log lines to targets, and the agent's side of it."""

# Packages and files whose checksum is the log forwarder's version (`source_checksum`). A unit test compares this list
# with the forwarder's imports.
PACKAGES = ("log_forwarder",)
ELSEWHERE = ("__init__.py", "log_settings.py", "services/__init__.py", "services/output_lines.py")
