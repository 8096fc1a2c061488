# SPDX-License-Identifier: Apache-2.0
"""The agent inside an amphora.

Invariant: nothing here knows the control plane; docs/agent-api.md and docs/heartbeat.md are all they share.
"""
