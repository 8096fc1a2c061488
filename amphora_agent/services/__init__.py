# SPDX-License-Identifier: Apache-2.0
"""Daemons of the amphora: start, supervise, and report their health."""
