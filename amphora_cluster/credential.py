# SPDX-License-Identifier: Apache-2.0
"""The application credential with which a group uses the cloud."""

from __future__ import annotations

import msgspec

from amphora_driver.secret import Secret


class ApplicationCredential(msgspec.Struct, frozen=True, kw_only=True):
    """An application credential of the user that owns a group.

    Its rights are the limit of the group. The user can revoke it in Keystone at any time.
    """

    id: str
    secret: Secret
