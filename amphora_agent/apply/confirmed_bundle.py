# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle on disk.

Invariant: the stored bundle was served when it was stored, and it is replaced as a whole or not at all. It holds names
and digests of the TLS files, never their content. The space for a new bundle is reserved before any change of a serving
process, and its data is on disk before the rename that confirms it. That rename needs no space.

HAProxy's text may have megabytes, so it is not written twice: a hard link gives HAProxy's file a second name. Each text
has its own link, so the rename of `confirmed.json` also selects the text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from amphora_agent.bundle import Bundle, parse_stored
from amphora_agent.errors import MachineError
from amphora_agent.haproxy import config_file
from amphora_agent.paths import sync, sync_directory, write

_TEXTS = "confirmed."
_DIGITS = 32


@dataclass(frozen=True)
class Confirmed:
    """A bundle that HAProxy has confirmed.

    ``digest`` is the digest of the received body. ``applied_at`` is the time at which the change began.
    """

    bundle: Bundle
    digest: str
    applied_at: str


def confirmed_now(bundle: Bundle, digest: str) -> Confirmed:
    """Return the record of a bundle that is being applied, with the present time."""
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    return Confirmed(bundle.without_contents(), digest, moment.isoformat().replace("+00:00", "Z"))


class Draft:
    """The record that becomes the confirmed bundle if the change succeeds."""

    def __init__(self, path: Path, confirmed: Confirmed) -> None:
        self.confirmed = confirmed
        self._path = path
        self._reserved = self._synced = False

    @property
    def _haproxy(self) -> str | None:
        return self.confirmed.bundle.haproxy

    @property
    def _new_path(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    @property
    def _text_path(self) -> Path:
        return _text_path(self._path, self.confirmed)

    def reserve(self, file: Path | None) -> None:
        """Write the record under a temporary name; does nothing the second time.

        Args:
            file: HAProxy's file; None if no HAProxy is wanted.

        Raises:
            OSError: the disk is full.
        """
        if self._reserved:
            return
        document = {
            "applied_at": self.confirmed.applied_at,
            "digest": self.confirmed.digest,
            "text": None if file is None else self._text_path.name,
            "text_sha256": None if self._haproxy is None else _sha256(self._haproxy),
            "bundle": replace(self.confirmed.bundle, haproxy=None).to_document(),
        }
        try:
            if file is not None:
                _link(file, self._text_path)
            write(self._new_path, json.dumps(document), durable=False)
        except OSError:
            self.discard()
            raise
        self._reserved = True

    def sync(self) -> None:
        """Sync the record to disk; does nothing the second time.

        Raises:
            OSError: the disk is broken.
        """
        if not self._synced:
            sync(self._new_path)
        self._synced = True

    def confirm(self) -> None:
        """Make the record the confirmed bundle, and sync its directory with all other renames in it.

        Raises:
            OSError: the disk is broken.
        """
        self.sync()
        self._new_path.replace(self._path)
        sync_directory(self._path.parent)
        _remove_other_texts(self._path, self._text_path)

    def discard(self) -> None:
        """Remove the record, because the change failed."""
        self._reserved = self._synced = False
        try:
            self._new_path.unlink()
        except FileNotFoundError:
            return  # the text is not reserved, or it is confirmed and in use
        self._text_path.unlink(missing_ok=True)


def sync_candidate(draft: Draft | None, file: Path) -> None:
    """Sync HAProxy's file, and the draft that belongs to it, to disk.

    Raises:
        OSError: the disk is broken.
    """
    sync(file)
    if draft is not None:
        draft.sync()


def relink_text(path: Path, confirmed: Confirmed, file: Path) -> None:
    """Link HAProxy's repaired file to the name by which the confirmed bundle refers to it.

    Raises:
        OSError: the disk has no space for a directory entry.
    """
    _link(file, _text_path(path, confirmed))
    sync_directory(path.parent)


def _text_path(path: Path, confirmed: Confirmed) -> Path:
    return path.with_name(f"{_TEXTS}{confirmed.digest[:_DIGITS]}.cfg")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _link(file: Path, name: Path) -> None:
    """Link a file to a second name, and replace the file that has this name so far."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.link(file, temporary)
    temporary.replace(name)
    temporary.unlink(missing_ok=True)  # rename(2) does nothing if both names are the same file


def _texts(path: Path) -> Iterator[Path]:
    return path.parent.glob(f"{_TEXTS}*.cfg")


def _remove_other_texts(path: Path, text: Path) -> None:
    for found in _texts(path):
        if found != text:
            found.unlink(missing_ok=True)


def _read_text(places: Sequence[Path], sha256: str | None) -> str:
    """Return the load balancer's text from the first of these files with the correct digest.

    Args:
        sha256: of the text; None if an older version of the agent has stored the bundle without it.

    Raises:
        ValueError: none of the files holds the text.
    """
    for place in places:
        with suppress(FileNotFoundError):
            text = config_file.read(place.read_text(encoding="utf-8")).text
            if sha256 is None or _sha256(text) == sha256:
                return text
    raise ValueError("HAProxy's text is missing or was modified")


def read(path: Path, file: Path) -> Confirmed | None:
    """Return the confirmed bundle; None if this amphora has never confirmed one.

    Args:
        path: of the bundle.
        file: HAProxy's file, which holds the same text if the other one was modified.

    Raises:
        MachineError: the file exists, but is unreadable or differs from the confirmed bundle.
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
