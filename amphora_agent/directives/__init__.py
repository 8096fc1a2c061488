# SPDX-License-Identifier: Apache-2.0
"""The directives that a load balancer's HAProxy configuration may contain."""
