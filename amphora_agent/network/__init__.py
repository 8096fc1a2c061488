# SPDX-License-Identifier: Apache-2.0
"""The load balancer's network namespace: interfaces, addresses, routes, announcements."""
