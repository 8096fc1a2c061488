# SPDX-License-Identifier: Apache-2.0
"""Configuration drift: detection and repair of differences from the confirmed bundle."""
