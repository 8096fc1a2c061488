# SPDX-License-Identifier: Apache-2.0
"""This machine: network namespaces, and processes that outlive the process that starts them."""
