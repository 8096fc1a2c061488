# SPDX-License-Identifier: Apache-2.0
"""Configuration drift: detect that this amphora differs from its confirmed bundle, and repair it."""
