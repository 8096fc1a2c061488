# SPDX-License-Identifier: Apache-2.0
"""What the agent answers to HAProxy itself: metrics for scrapers, and whether a member answers a ping."""
