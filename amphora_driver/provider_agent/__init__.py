# SPDX-License-Identifier: Apache-2.0
"""The provider agent: the process that reports statuses to Octavia and reads objects from it."""
