# SPDX-License-Identifier: Apache-2.0
"""The provider agent: the process beside Octavia that reports statuses to it and reads objects from it."""
