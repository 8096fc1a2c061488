# SPDX-License-Identifier: Apache-2.0
"""UDP and SCTP listeners: the model and the interface of the forwarding engine."""
