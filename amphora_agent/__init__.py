# SPDX-License-Identifier: Apache-2.0
"""The agent inside an amphora. Its interfaces are docs/reference/agent-api.md and heartbeat.md."""
