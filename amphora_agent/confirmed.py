# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle.

Invariant: what is on disk was served when it was written, and is replaced as a whole or not at all. No file's
content is in it: names and digests only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from amphora_agent.bundle import Bundle, parse_stored
from amphora_agent.errors import MachineError
from amphora_agent.paths import write_atomically


@dataclass(frozen=True)
class Confirmed:
    """A bundle that HAProxy has confirmed. ``digest`` is that of the body in which it came."""

    bundle: Bundle
    digest: str
    applied_at: str


def now_confirmed(bundle: Bundle, digest: str) -> Confirmed:
    """A bundle that is confirmed as of now."""
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    return Confirmed(bundle.without_contents(), digest, moment.isoformat().replace("+00:00", "Z"))


def write(path: Path, confirmed: Confirmed) -> None:
    """Write it down."""
    document = {
        "applied_at": confirmed.applied_at,
        "digest": confirmed.digest,
        "bundle": confirmed.bundle.stored(),
    }
    write_atomically(path, json.dumps(document))


def read(path: Path) -> Confirmed | None:
    """The one written last; None on an amphora that never confirmed any.

    Raises:
        MachineError: there is a file, but it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Confirmed(parse_stored(document["bundle"]), str(document["digest"]), str(document["applied_at"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"read {path}", str(error), "Push the bundle again.") from error
