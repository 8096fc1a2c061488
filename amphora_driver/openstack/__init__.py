# SPDX-License-Identifier: Apache-2.0
"""Access to the services of an OpenStack cloud. The backends of `network` and `compute` use it."""
