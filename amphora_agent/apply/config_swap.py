# SPDX-License-Identifier: Apache-2.0
"""The file that HAProxy would start from: how it is replaced, and how it is brought back.

Invariant: at every moment it is a file that HAProxy has checked, and until the change is finished the one before it
is there too, under another name. Going on and going back are renames: neither takes room on the disk.
"""

from __future__ import annotations

import os

from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import config_file
from amphora_agent.haproxy.config_file import Document
from amphora_agent.paths import Paths


class Switch:
    """One change at a time: `reserve`, `mark`, `go`, and then `finish` or `go_back`.

    Attributes:
        gone: whether the file was replaced since the last `reserve` or `finish`.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self.gone = False
        self._before: Document | None = None
        self._read: tuple[tuple[int, ...], Document] | None = None

    def serving(self) -> Document | None:
        """What HAProxy runs, or would start from; None if there is no file."""
        try:
            found = self._paths.configuration.stat()
            # A file is never written twice: another content is another file.
            which = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._read is None or self._read[0] != which:
                self._read = which, config_file.read(self._paths.configuration.read_text(encoding="utf-8"))
            return self._read[1]
        except FileNotFoundError:
            return None

    def doubt(self) -> None:
        """Read the file again: somebody may have written into it."""
        self._read = None

    @property
    def before(self) -> Document | None:
        """What was there when the present change began."""
        return self._before

    @property
    def is_interrupted(self) -> bool:
        """Whether the file and what HAProxy runs may differ."""
        return self._paths.unfinished.exists()

    def reserve(self) -> None:
        """Keep the present file.

        Raises:
            OSError: there is no room for a name.
        """
        self.gone, self._before = False, self.serving()
        self._paths.previous.unlink(missing_ok=True)
        if self._before is not None:
            os.link(self._paths.configuration, self._paths.previous)

    def mark(self) -> None:
        """From now on the file and what HAProxy runs may differ."""
        self._paths.unfinished.touch()
        reach(Point.MARKED)

    def go(self) -> None:
        """Put the candidate in the file's place.

        After a power cut HAProxy does not run and the confirmed bundle decides: neither the mark nor this has to be on
        disk before that bundle is, and confirming it syncs their directory.
        """
        self._paths.candidate.replace(self._paths.configuration)
        self.gone = True
        reach(Point.SWITCHED)

    def go_back(self) -> Document | None:
        """Put the former file in its place; None if there was none. The mark stays: the next change reloads."""
        reach(Point.RETURNING)
        if not self.gone:
            return self._before
        if self._before is None:
            self._paths.configuration.unlink(missing_ok=True)
        else:
            self._paths.previous.replace(self._paths.configuration)
        self.gone = False
        return self._before

    def forget(self) -> None:
        """HAProxy is not wanted: nothing to start from. The former file is kept until `finish`."""
        self.reserve()
        self._paths.configuration.unlink(missing_ok=True)
        self.gone = True

    def finish(self) -> None:
        """HAProxy runs what is in the file."""
        self.gone = False
        self._paths.unfinished.unlink(missing_ok=True)
        self._paths.candidate.unlink(missing_ok=True)
        self._paths.previous.unlink(missing_ok=True)
