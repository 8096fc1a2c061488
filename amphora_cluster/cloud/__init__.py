# SPDX-License-Identifier: Apache-2.0
"""The public APIs of Octavia, Nova and Heat, with the application credential of a group's owner."""
