# SPDX-License-Identifier: Apache-2.0
"""The agent code that amphorae of this machine run; it takes the place of an image.

Invariant: the digest depends on file contents only, not on paths or times. It is computed again only after a file has
changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import threading
from pathlib import Path

LOG = logging.getLogger(__name__)
# Time-out in seconds of the Python interpreter that prints the directory of the agent's package.
_TIMEOUT = 20.0
_WHERE = (
    "import importlib.util as u; print(*(u.find_spec('amphora_agent').submodule_search_locations or ()), sep='\\n')"
)
# Number of hexadecimal digits of the digest that distinguishes versions of the agent on one host.
_DIGITS = 16
_SUFFIXES = {".py", ".j2", ".sh"}


class AgentSource:
    """The agent's package as the Python interpreter of the agents finds it."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._folders: tuple[Path, ...] | None = None
        self._known: tuple[tuple[tuple[str, int, int], ...], str] | None = None

    def digest(self) -> str | None:
        """Return the digest of the package files as `agent-…`; None if the interpreter finds no package.

        Raises:
            OSError: a file cannot be read.
        """
        with self._lock:
            if self._folders is None:
                self._folders = self._find()
            files = [(folder, path) for folder in self._folders for path in _source_files(folder)]
            if not files:
                return None
            seen = tuple((str(path), (at := path.stat()).st_mtime_ns, at.st_size) for _, path in files)
            if self._known is None or self._known[0] != seen:
                made = hashlib.sha256()
                for folder, path in files:
                    content = path.read_bytes()
                    made.update(f"{path.relative_to(folder)}:{len(content)}:".encode() + content)
                self._known = (seen, f"agent-{made.hexdigest()[:_DIGITS]}")
            return self._known[1]

    def _find(self) -> tuple[Path, ...]:
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
        env = {name: os.environ[name] for name in names if name in os.environ}
        try:
            argv = [self._python, "-c", _WHERE]
            printed = subprocess.run(
                argv, env=env, cwd="/", capture_output=True, text=True, timeout=_TIMEOUT, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            LOG.warning(
                "the compute backend does not know the version of the agent, because the Python interpreter %s does "
                "not find the agent's package; check the option agent_python: %s",
                self._python,
                error,
            )
            return ()
        return tuple(Path(line) for line in printed.stdout.splitlines() if line)


def _source_files(folder: Path) -> list[Path]:
    """Return the modules and templates of a package; compiled modules are no part of the source code."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in _SUFFIXES)
