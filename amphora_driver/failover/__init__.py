# SPDX-License-Identifier: Apache-2.0
"""Failure detection: silent amphorae, circuit breaker, and requests for fail-over."""
