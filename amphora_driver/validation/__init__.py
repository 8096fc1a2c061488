# SPDX-License-Identifier: Apache-2.0
"""What this provider serves, and how it refuses the rest."""
