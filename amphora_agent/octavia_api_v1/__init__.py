# SPDX-License-Identifier: Apache-2.0
"""Octavia's amphora API 1.0 (docs/reference/amphora-api-v1.md), converted to bundles."""
