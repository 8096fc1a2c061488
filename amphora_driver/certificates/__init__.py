# SPDX-License-Identifier: Apache-2.0
"""The authority for amphorae and controllers."""
