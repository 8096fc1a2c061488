# SPDX-License-Identifier: Apache-2.0
"""Drift of the amphora from its confirmed bundle: check, repair, report."""
