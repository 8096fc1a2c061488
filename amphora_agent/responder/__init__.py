# SPDX-License-Identifier: Apache-2.0
"""The responder: a daemon that gives HAProxy the metrics for scrapers and the results of pings."""
