# SPDX-License-Identifier: Apache-2.0
"""The controller process: service, worker slots, liveness."""
