# SPDX-License-Identifier: Apache-2.0
"""Adoption: a load balancer of Octavia's provider `amphora` becomes one of this provider."""
