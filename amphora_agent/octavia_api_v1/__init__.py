# SPDX-License-Identifier: Apache-2.0
"""Octavia's amphora API 1.0: converts the uploads of Octavia's worker to bundles.

See docs/reference/amphora-api-v1.md.
"""
