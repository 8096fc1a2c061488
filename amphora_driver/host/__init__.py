# SPDX-License-Identifier: Apache-2.0
"""Network namespaces and detached processes of this machine."""
