# SPDX-License-Identifier: Apache-2.0
"""Uploaded files that no configuration has named yet.

Invariant: the files are in memory, readable by root only, and written completely or not at all. They survive the agent,
but not the machine: after a reboot the worker uploads them again.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from amphora_agent.bundle import MAX_FILES, MAX_FILES_BYTES
from amphora_agent.errors import RequestRefused
from amphora_agent.paths import Paths, write_atomically


class Uploads:
    """The uploaded files by load balancer."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.run / "octavia"

    def put(self, load_balancer_id: str, name: str, content: str) -> None:
        """Store or replace a file.

        Raises:
            RequestRefused: the limit of all files is exceeded.
            OSError: the machine's memory is full, for example.
        """
        directory = self._root / load_balancer_id
        others = [path for path in self._files(directory) if path.name != name]
        if len(others) >= MAX_FILES or sum(path.stat().st_size for path in others) + len(content) > MAX_FILES_BYTES:
            raise RequestRefused("Invalid request", "there are too many certificate files", 500)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / name, content, durable=False)

    def get(self, load_balancer_id: str, name: str) -> str | None:
        """Return the content of a file; None if it does not exist."""
        with suppress(FileNotFoundError):
            return (self._root / load_balancer_id / name).read_bytes().decode()
        return None

    def delete(self, load_balancer_id: str, name: str) -> None:
        """Delete a file; no error if it does not exist."""
        (self._root / load_balancer_id / name).unlink(missing_ok=True)

    def forget(self) -> None:
        """Delete all files."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root)

    @staticmethod
    def _files(directory: Path) -> list[Path]:
        with suppress(FileNotFoundError):
            return list(directory.iterdir())
        return []
