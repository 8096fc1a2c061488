# SPDX-License-Identifier: Apache-2.0
"""One amphora, on its own.

Invariant: nobody takes over when it fails; a replacement is booted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class SingleTopology:
    """SINGLE."""

    name: ClassVar[str] = "SINGLE"
    roles: ClassVar[tuple[str, ...]] = ("STANDALONE",)
    priorities: ClassVar[Mapping[str, int]] = MappingProxyType({})
