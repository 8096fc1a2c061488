# SPDX-License-Identifier: Apache-2.0
"""Rendering: a load balancer as HAProxy configuration and as bundle; pure, without I/O."""
