# SPDX-License-Identifier: Apache-2.0
"""Where the files that Octavia's worker uploads wait until a configuration names them.

Invariant: in memory only, readable by root only, each written as a whole or not at all. They outlive the agent, not the
machine: after a reboot the worker finds them missing and uploads them again.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from amphora_agent.bundle import MAX_FILES, MAX_FILES_BYTES
from amphora_agent.errors import RequestRefused
from amphora_agent.paths import Paths, write_atomically


class Uploads:
    """The files, by the load balancer they are for."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.run / "octavia"

    def put(self, load_balancer_id: str, name: str, content: str) -> None:
        """Take a file, or another content of it.

        Raises:
            RequestRefused: there is no room for it.
            OSError: the machine's memory is full, for example.
        """
        directory = self._root / load_balancer_id
        others = [path for path in self._files(directory) if path.name != name]
        if len(others) >= MAX_FILES or sum(path.stat().st_size for path in others) + len(content) > MAX_FILES_BYTES:
            raise RequestRefused("Invalid request", "there are too many certificate files", 500)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / name, content, durable=False)

    def get(self, load_balancer_id: str, name: str) -> str | None:
        """A file's content; None if there is no such file."""
        with suppress(FileNotFoundError):
            return (self._root / load_balancer_id / name).read_bytes().decode()
        return None

    def delete(self, load_balancer_id: str, name: str) -> None:
        """Forget a file; no error if there is none."""
        (self._root / load_balancer_id / name).unlink(missing_ok=True)

    def forget(self) -> None:
        """Forget all."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root)

    @staticmethod
    def _files(directory: Path) -> list[Path]:
        with suppress(FileNotFoundError):
            return list(directory.iterdir())
        return []
