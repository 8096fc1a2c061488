# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet for `fleet.py`: real processes of the control plane, simulated amphorae."""
