# SPDX-License-Identifier: Apache-2.0
"""What an operator's availability zone may say about load balancers of this provider.

Invariant: what `supported` lists, `validate` accepts, and nothing else; the caller's metadata is never
changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from amphora_driver.capabilities.metadata import Schema

_SCHEMA = Schema("availability zone", "availability_zone.json", served={"compute_zone": None})


def supported() -> dict[str, str]:
    """Availability zone keys that are served, each with a description without commas."""
    return _SCHEMA.supported()


def validate(metadata: Mapping[str, object] | None) -> None:
    """Check availability zone metadata.

    Args:
        metadata: the zone's expanded metadata; None or empty is fine.

    Raises:
        UnsupportedOption: naming the key that is unknown, ill-typed or not served.
    """
    _SCHEMA.validate(metadata)
