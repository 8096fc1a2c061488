# SPDX-License-Identifier: Apache-2.0
"""The one-machine stack: real Octavia, this provider, and namespaces for amphorae, clients and members."""
