# SPDX-License-Identifier: Apache-2.0
"""Bring one load balancer to its desired state: plan, steps, push, drain."""
