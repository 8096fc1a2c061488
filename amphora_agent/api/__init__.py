# SPDX-License-Identifier: Apache-2.0
"""The agent's API, version 2 (docs/reference/agent-api.md)."""
