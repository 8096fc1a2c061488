# SPDX-License-Identifier: Apache-2.0
"""Cluster membership: groups of servers as pool members, for load balancers of any provider."""
