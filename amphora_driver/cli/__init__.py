# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`, the operator's command line: one module per group of commands."""
