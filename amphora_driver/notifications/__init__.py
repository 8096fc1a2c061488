# SPDX-License-Identifier: Apache-2.0
"""Notifications of load balancers for other OpenStack services."""
