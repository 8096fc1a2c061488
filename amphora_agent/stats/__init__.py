# SPDX-License-Identifier: Apache-2.0
"""What HAProxy counts and finds out, and how the controllers learn of it."""
