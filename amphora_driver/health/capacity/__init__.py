# SPDX-License-Identifier: Apache-2.0
"""Many heartbeats: several receivers on one port, and omissions during overload."""
