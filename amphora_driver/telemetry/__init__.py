# SPDX-License-Identifier: Apache-2.0
"""The status page and the fleet metrics of the control plane."""
