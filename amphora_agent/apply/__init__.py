# SPDX-License-Identifier: Apache-2.0
"""The order of a change, its rollback, and its confirmation."""
