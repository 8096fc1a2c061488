# SPDX-License-Identifier: Apache-2.0
"""The sandbox: Octavia, this provider, amphorae, a client and members on one machine."""
