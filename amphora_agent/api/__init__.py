# SPDX-License-Identifier: Apache-2.0
"""The agent's own interface, version 2 (docs/agent-api.md)."""
