# SPDX-License-Identifier: Apache-2.0
"""Apply a bundle: receive, compare, change, verify, confirm, or roll back."""
