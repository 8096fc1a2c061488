# SPDX-License-Identifier: Apache-2.0
"""The log forwarder: a process that sends log lines to targets, and the agent's side of it."""
