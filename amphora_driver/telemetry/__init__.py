# SPDX-License-Identifier: Apache-2.0
"""What can be seen of the control plane from outside: metrics, logs, and the status page."""
