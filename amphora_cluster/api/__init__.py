# SPDX-License-Identifier: Apache-2.0
"""The HTTP API: webhooks that let servers join and leave, and the status of a group."""
