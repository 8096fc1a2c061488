# SPDX-License-Identifier: Apache-2.0
"""Parsers for the parts of certificates and revocation lists that the agent reads."""
