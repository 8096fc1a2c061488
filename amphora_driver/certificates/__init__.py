# SPDX-License-Identifier: Apache-2.0
"""Certificates of amphorae and controllers: the CA, its rotation, renewal and the trust store."""
