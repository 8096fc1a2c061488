# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`: what an operator may look at."""
