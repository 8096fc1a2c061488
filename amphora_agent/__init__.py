# SPDX-License-Identifier: Apache-2.0
"""The agent inside an amphora.

Invariant: no module imports the control plane. The interface is docs/reference/agent-api.md and
docs/reference/heartbeat.md.
"""
