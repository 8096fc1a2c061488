# SPDX-License-Identifier: Apache-2.0
"""The exchange of HAProxy's configuration file, and its rollback.

Invariant: HAProxy has accepted each line of the file: by a check of a file, or by a verified change at run time
(`config_check.is_needed`). The previous file exists until the end of the change. Commit and rollback are renames, which
need no disk space.
"""

from __future__ import annotations

import os

from amphora_agent.failpoints import Point, reach
from amphora_agent.haproxy import config_file
from amphora_agent.haproxy.config_file import Document
from amphora_agent.paths import Paths


class ConfigSwap:
    """One change at a time: `reserve`, `mark_unfinished`, `commit`, and then `finish` or `roll_back`.

    ``committed``: the file was replaced since the last `reserve` or `finish`. ``before``: the document at the start of
    the change.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self.committed = False
        self.before: Document | None = None
        self._read: tuple[tuple[int, ...], Document] | None = None

    def current(self) -> Document | None:
        """The document of HAProxy's file; None without a file."""
        try:
            found = self._paths.configuration.stat()
            # Each change of haproxy.cfg creates a new inode. With equal inode, size and time, the content is equal, so
            # the agent does not read the file again.
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._read is None or self._read[0] != identity:
                self._read = identity, config_file.read(self._paths.configuration.read_text(encoding="utf-8"))
            return self._read[1]
        except FileNotFoundError:
            return None

    def invalidate(self) -> None:
        """Read the file again at the next `current`, because another program may have changed the file."""
        self._read = None

    @property
    def is_interrupted(self) -> bool:
        """Whether the file and the running HAProxy may differ."""
        return self._paths.unfinished.exists()

    def reserve(self) -> None:
        """Keep the present file under a second name. Raises OSError on a full disk."""
        self.committed, self.before = False, self.current()
        self._paths.previous.unlink(missing_ok=True)
        if self.before is not None:
            os.link(self._paths.configuration, self._paths.previous)

    def mark_unfinished(self) -> None:
        """Record that the file and the running HAProxy may differ from now on."""
        self._paths.unfinished.touch()
        reach(Point.MARKED)

    def commit(self) -> None:
        """Replace the file by the candidate.

        No sync is necessary: after a power cut HAProxy does not run, and the agent applies the confirmed bundle. The
        confirmation of the new bundle syncs the directory.
        """
        self._paths.candidate.replace(self._paths.configuration)
        self.committed = True
        reach(Point.SWITCHED)

    def roll_back(self) -> Document | None:
        """Restore the previous file and return it; None if there was none.

        The mark of an unfinished change stays, so that the next change reloads HAProxy.
        """
        reach(Point.RETURNING)
        if self.committed:
            if self.before is None:
                self._paths.configuration.unlink(missing_ok=True)
            else:
                self._paths.previous.replace(self._paths.configuration)
            self.committed = False
        return self.before

    def remove(self) -> None:
        """Remove the file, because HAProxy is not wanted. The previous file exists until `finish`."""
        self.reserve()
        self._paths.configuration.unlink(missing_ok=True)
        self.committed = True

    def finish(self) -> None:
        """End the change, because HAProxy runs the document of the file."""
        self.committed = False
        self._paths.unfinished.unlink(missing_ok=True)
        self._paths.candidate.unlink(missing_ok=True)
        self._paths.previous.unlink(missing_ok=True)
