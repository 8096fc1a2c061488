# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle.

Invariant: what is on disk was served when it got its name, and is replaced as a whole or not at all. No file's
content is in it: names and digests only. What is to replace it is on disk before anything that serves is touched; to
put it in its place afterwards takes no room on the disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from amphora_agent.bundle import Bundle, parse_stored
from amphora_agent.errors import MachineError
from amphora_agent.paths import sync_directory, write


@dataclass(frozen=True)
class Confirmed:
    """A bundle that HAProxy has confirmed. ``digest`` is that of the body in which it came.

    ``applied_at`` is when the change began to be made.
    """

    bundle: Bundle
    digest: str
    applied_at: str


def as_of_now(bundle: Bundle, digest: str) -> Confirmed:
    """A bundle that is going to be confirmed."""
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    return Confirmed(bundle.without_contents(), digest, moment.isoformat().replace("+00:00", "Z"))


class Draft:
    """What will be confirmed if all goes well."""

    def __init__(self, path: Path, confirmed: Confirmed) -> None:
        self.confirmed = confirmed
        self._path = path
        self._reserved = False

    @property
    def _place(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    def reserve(self) -> None:
        """Have it on disk, under another name; does nothing the second time.

        Raises:
            OSError: there is no room for it.
        """
        if self._reserved:
            return
        document = {
            "applied_at": self.confirmed.applied_at,
            "digest": self.confirmed.digest,
            "bundle": self.confirmed.bundle.stored(),
        }
        try:
            write(self._place, json.dumps(document), durable=True)
        except OSError:
            self.discard()
            raise
        self._reserved = True

    def confirm(self) -> None:
        """Make it the last confirmed bundle, durably, with everything else that was renamed in its directory.

        Raises:
            OSError: the disk is broken.
        """
        self.reserve()
        self._place.replace(self._path)
        sync_directory(self._path.parent)

    def discard(self) -> None:
        """It will not be confirmed."""
        self._reserved = False
        self._place.unlink(missing_ok=True)


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
