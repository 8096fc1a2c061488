# SPDX-License-Identifier: Apache-2.0
"""Periodic work of a controller: cleanup, certificate renewal, drift audit, image rotation."""
