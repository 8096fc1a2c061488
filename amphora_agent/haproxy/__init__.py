# SPDX-License-Identifier: Apache-2.0
"""HAProxy: its configuration as data, its processes, and its sockets."""
