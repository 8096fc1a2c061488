# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle on disk.

Invariant: the record has names and digests of the TLS files, never their content. The agent reserves the space for a
new record before any change of a serving process. A synced record becomes the confirmed one by a rename. HAProxy's text
may have megabytes, so the record does not repeat the text. A hard link gives HAProxy's file a second name, which the
record contains. The rename of the record therefore also selects the text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from amphora_agent.bundle import Bundle, digest, parse_stored
from amphora_agent.errors import MachineError
from amphora_agent.haproxy import config_file
from amphora_agent.paths import sync, write

_TEXTS = "confirmed."
_DIGITS = 32


@dataclass(frozen=True)
class Confirmed:
    """A confirmed bundle, the digest of the received body, and the time at which the change began."""

    bundle: Bundle
    digest: str
    applied_at: str


def confirmed_now(bundle: Bundle, received: str) -> Confirmed:
    """Return the record of a bundle with the present time."""
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    return Confirmed(bundle.without_contents(), received, moment.isoformat().replace("+00:00", "Z"))


class Draft:
    """The record of a bundle, which becomes the confirmed one after a successful change."""

    def __init__(self, path: Path, confirmed: Confirmed) -> None:
        self.confirmed = confirmed
        self._path, self._new_path = path, path.with_name(f"{path.name}.new")
        self._text_path = _text_path(path, confirmed)
        self._reserved = self._synced = False

    def reserve(self, file: Path | None) -> None:
        """Write the record under a temporary name, once. Raises OSError on a full disk.

        `file` is HAProxy's file, if HAProxy is wanted.
        """
        if self._reserved:
            return
        text = self.confirmed.bundle.haproxy
        document = {
            "applied_at": self.confirmed.applied_at,
            "digest": self.confirmed.digest,
            "text": None if file is None else self._text_path.name,
            "text_sha256": None if text is None else digest(text.encode()),
        }
        record = f'{json.dumps(document)[:-1]}, "bundle": {replace(self.confirmed.bundle, haproxy=None).to_json()}}}'
        try:
            if file is not None:
                _link(file, self._text_path)
            write(self._new_path, record, durable=False)
        except OSError:
            self.discard()
            raise
        self._reserved = True

    def sync(self) -> None:
        """Sync the record to disk, once. Raises OSError."""
        if not self._synced:
            sync(self._new_path)
        self._synced = True

    def confirm(self) -> None:
        """Make the record the confirmed bundle, and sync its directory with all other renames. Raises OSError."""
        self.sync()
        self._new_path.replace(self._path)
        sync(self._path.parent)
        for found in self._path.parent.glob(f"{_TEXTS}*.cfg"):
            if found != self._text_path:
                found.unlink(missing_ok=True)

    def discard(self) -> None:
        self._reserved = self._synced = False
        try:
            self._new_path.unlink()
        except FileNotFoundError:
            # No new record was written, so `_text_path` may be the text of the confirmed bundle, which must stay.
            return
        self._text_path.unlink(missing_ok=True)


def sync_candidate(draft: Draft | None, file: Path) -> None:
    """Sync HAProxy's file and its draft to disk. Raises OSError."""
    sync(file)
    if draft is not None:
        draft.sync()


def relink_text(path: Path, confirmed: Confirmed, file: Path) -> None:
    """Link HAProxy's repaired file to the name in the confirmed bundle. Raises OSError on a full disk."""
    _link(file, _text_path(path, confirmed))
    sync(path.parent)


def _text_path(path: Path, confirmed: Confirmed) -> Path:
    return path.with_name(f"{_TEXTS}{confirmed.digest[:_DIGITS]}.cfg")


def _link(file: Path, name: Path) -> None:
    """Link a file to a second name; replace an existing file with this name."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.link(file, temporary)
    temporary.replace(name)
    # rename(2) does nothing if both names refer to the same inode, so `temporary` may still exist.
    temporary.unlink(missing_ok=True)


def _read_text(places: Sequence[Path], sha256: str | None) -> str:
    """Return the load balancer's text from the first of these files with the correct digest.

    An older version of the agent has stored bundles without the digest. Raises ValueError if no file has the text.
    """
    for place in places:
        with suppress(FileNotFoundError):
            text = config_file.read(place.read_text(encoding="utf-8")).text
            if sha256 is None or digest(text.encode()) == sha256:
                return text
    raise ValueError("HAProxy's text is missing or was modified")


def read(path: Path, file: Path) -> Confirmed | None:
    """Return the confirmed bundle; None if this amphora has never confirmed one.

    If another program has modified the stored text, HAProxy's `file` may still have the text. Raises MachineError if
    the record is unreadable or the text is lost.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        bundle = parse_stored(document["bundle"])
        if document["text"] is not None:
            places = (path.with_name(document["text"]), file)
            bundle = replace(bundle, haproxy=_read_text(places, document.get("text_sha256")))
        return Confirmed(bundle, str(document["digest"]), str(document["applied_at"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"read {path}", str(error), "Push the bundle again.") from error
