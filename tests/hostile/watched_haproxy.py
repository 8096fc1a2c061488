# SPDX-License-Identifier: Apache-2.0
"""The files that HAProxy opens while it reads a configuration (`haproxy -c`), as reported by inotify."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from haproxy_versions import HAProxy, machine

_IN_OPEN, _NONBLOCK = 0x20, os.O_NONBLOCK
_END = "the-last-line-of-all"


class Watch:
    """Records each opening of a file in a folder, by any process and name."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(_NONBLOCK)
        if self._descriptor < 0 or libc.inotify_add_watch(self._descriptor, os.fsencode(folder), _IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), f"inotify does not watch {folder}")

    def saw(self) -> bool:
        """Return whether a file was opened since the previous call."""
        try:
            return bool(os.read(self._descriptor, 65536))
        except BlockingIOError:
            return False

    def close(self) -> None:
        os.close(self._descriptor)


class Lines:
    """Lets HAProxy read lines, each in its own sections, beside a folder without files of the bundle."""

    def __init__(self, version: HAProxy, place: Path) -> None:
        self.version, self.place = version, place
        self.outside = place / "outside"
        self.outside.mkdir()
        for name in ("secret", "secret.pem"):
            (self.outside / name).write_text("secret\n")
            (self.outside / name).chmod(0o755)
        self.watch = Watch(self.outside)

    def command(self, lines: Sequence[str]) -> list[str]:
        """Return the command of the HAProxy that reads these lines."""
        sections = [f"frontend f{n}\n{line}\nbackend b{n}\n{line}\n" for n, line in enumerate(lines)]
        file = self.place / "lines.cfg"
        file.write_bytes("".join(["defaults\n    mode http\n", *sections, f"backend end\n    {_END}\n"]).encode())
        assert self.version.program
        return [self.version.program, "-c", "-f", str(machine(self.place / "bundle")), "-f", str(file)]

    def culprits(self, lines: Sequence[str]) -> list[str]:
        """Return the lines for which HAProxy opened a file outside."""
        if not lines:
            return []
        self.watch.saw()
        run = subprocess.run(self.command(lines), capture_output=True, check=False)
        # Some errors end the parsing, so HAProxy did not read the lines after them.
        whole = _END.encode() in run.stderr
        if whole and not self.watch.saw():
            return []
        if len(lines) == 1:
            return list(lines) if self.watch.saw() or whole else []
        middle = len(lines) // 2
        return self.culprits(lines[:middle]) + self.culprits(lines[middle:])
