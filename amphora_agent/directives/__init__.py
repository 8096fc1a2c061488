# SPDX-License-Identifier: Apache-2.0
"""What a load balancer's configuration may have HAProxy do."""
