# SPDX-License-Identifier: Apache-2.0
"""Octavia's amphora API 1.0: uploads of its worker as parts of a bundle.

See docs/reference/amphora-api-v1.md.
"""
