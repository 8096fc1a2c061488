# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle.

Invariant: what is on disk was served when it got its name, and is replaced as a whole or not at all. No file's
content is in it: names and digests only. What is to replace it has its room on the disk before anything that serves is
touched, and is there before it gets its name; to put it in its place takes no room.

HAProxy's text, which may be megabytes, is not written a second time: it is HAProxy's file, under one more name (a hard
link). A new file has a new one of these names, so that `confirmed.json` decides with one rename which of them counts.
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
from amphora_agent.haproxy import config_file as document_of
from amphora_agent.paths import sync, sync_directory, write

_TEXTS = "confirmed."
_DIGITS = 32


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
        self._reserved = self._settled = False

    @property
    def _haproxy(self) -> str | None:
        return self.confirmed.bundle.haproxy

    @property
    def _place(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    @property
    def _text(self) -> Path:
        return _text_of(self._path, self.confirmed)

    def reserve(self, file: Path | None) -> None:
        """Have room for it on disk, under other names; does nothing the second time.

        Args:
            file: HAProxy's; None where no HAProxy is wanted.

        Raises:
            OSError: there is no room for it.
        """
        if self._reserved:
            return
        document = {
            "applied_at": self.confirmed.applied_at,
            "digest": self.confirmed.digest,
            "text": None if file is None else self._text.name,
            "text_sha256": None if self._haproxy is None else _sha256(self._haproxy),
            "bundle": replace(self.confirmed.bundle, haproxy=None).stored(),
        }
        try:
            if file is not None:
                _name(file, self._text)
            write(self._place, json.dumps(document), durable=False)
        except OSError:
            self.discard()
            raise
        self._reserved = True

    def settle(self) -> None:
        """Have it on disk, not only the room for it; does nothing the second time.

        Raises:
            OSError: the disk is broken.
        """
        if not self._settled:
            sync(self._place)
        self._settled = True

    def confirm(self) -> None:
        """Make it the last confirmed bundle, durably, with everything else that was renamed in its directory.

        Raises:
            OSError: the disk is broken.
        """
        self.settle()
        self._place.replace(self._path)
        sync_directory(self._path.parent)
        _forget_others(self._path, self._text)

    def discard(self) -> None:
        """It will not be confirmed."""
        self._reserved = self._settled = False
        try:
            self._place.unlink()
        except FileNotFoundError:
            return  # it was not reserved, or has been confirmed already: then its text is needed
        self._text.unlink(missing_ok=True)


def settle(draft: Draft | None, file: Path) -> None:
    """Have on disk what so far has only its room there: a draft, and HAProxy's file that it goes with.

    Raises:
        OSError: the disk is broken.
    """
    sync(file)
    if draft is not None:
        draft.settle()


def keep_text(path: Path, confirmed: Confirmed, file: Path) -> None:
    """Have HAProxy's file, which is right again, under the name by which the confirmed bundle knows it.

    Raises:
        OSError: there is no room for a name.
    """
    _name(file, _text_of(path, confirmed))
    sync_directory(path.parent)


def _text_of(path: Path, confirmed: Confirmed) -> Path:
    return path.with_name(f"{_TEXTS}{confirmed.digest[:_DIGITS]}.cfg")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(file: Path, name: Path) -> None:
    """Give a file one more name, which may be another one's so far."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    os.link(file, temporary)
    temporary.replace(name)
    temporary.unlink(missing_ok=True)  # of two names of one file none replaces the other (rename(2))


def _texts(path: Path) -> Iterator[Path]:
    return path.parent.glob(f"{_TEXTS}*.cfg")


def _forget_others(path: Path, text: Path) -> None:
    for found in _texts(path):
        if found != text:
            found.unlink(missing_ok=True)


def _right_text(places: Sequence[Path], sha256: str | None) -> str:
    """The load balancer's text of the first of these files that holds it.

    Args:
        sha256: of the text; None where an agent before this one has not written it down.

    Raises:
        ValueError: none does.
    """
    for place in places:
        with suppress(FileNotFoundError):
            text = document_of.read(place.read_text(encoding="utf-8")).text
            if sha256 is None or _sha256(text) == sha256:
                return text
    raise ValueError("HAProxy's text is gone, or somebody has written into it")


def read(path: Path, file: Path) -> Confirmed | None:
    """The one written last; None on an amphora that never confirmed any.

    Args:
        path: of the bundle.
        file: HAProxy's, which may hold the text where somebody has written into the other one.

    Raises:
        MachineError: there is a file, but it cannot be read, or is not what was confirmed.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        bundle = parse_stored(document["bundle"])
        if document["text"] is not None:
            places = (path.with_name(document["text"]), file)
            bundle = replace(bundle, haproxy=_right_text(places, document.get("text_sha256")))
        return Confirmed(bundle, str(document["digest"]), str(document["applied_at"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MachineError(f"read {path}", str(error), "Push the bundle again.") from error
