# SPDX-License-Identifier: Apache-2.0
"""The agent's own interface, version 2 (docs/reference/agent-api.md)."""
