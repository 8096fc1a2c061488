# SPDX-License-Identifier: Apache-2.0
"""Validation of requests and of operators' metadata: each module checks one kind of option. Pure."""
