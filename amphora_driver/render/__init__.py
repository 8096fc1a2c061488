# SPDX-License-Identifier: Apache-2.0
"""Load balancers as configuration text; pure, no I/O."""
