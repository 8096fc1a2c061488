# SPDX-License-Identifier: Apache-2.0
"""Queries and records of the control plane, one module for each kind of record."""
