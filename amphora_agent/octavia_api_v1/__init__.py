# SPDX-License-Identifier: Apache-2.0
"""Octavia's documented amphora API 1.0: what its worker uploads, as parts of a bundle (docs/amphora-api-v1.md)."""
