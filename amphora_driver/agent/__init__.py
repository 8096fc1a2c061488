# SPDX-License-Identifier: Apache-2.0
"""The client of the amphora agent: requests, typed responses, mutual TLS."""
