# SPDX-License-Identifier: Apache-2.0
"""Files that Octavia's worker uploads: certificates with keys, CAs, revocation lists and crt-lists.

Invariant: only root can read the uploaded files, which are in memory. After a reboot the worker uploads them again. A
bundle contains only files of the served load balancer. No error repeats the content of a file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress

from amphora_agent.bundle import MAX_FILE_BYTES, MAX_FILES, MAX_FILES_BYTES, File, digest
from amphora_agent.errors import RequestRefused
from amphora_agent.paths import Paths, write_atomically

# Octavia's worker uses hashes and ids as names. The pattern excludes a leading dot, which could mean a hidden file or a
# parent directory.
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,90}\.pem")
_PEM = "-----BEGIN "


def checked_name(name: str) -> str:
    """Return a valid file name. Raises RequestRefused for another name."""
    if not _NAME.fullmatch(name):
        raise RequestRefused("Filename has wrong format", f"{name!r} is not the name of a .pem file")
    return name


def checked_content(name: str, body: bytes) -> str:
    """Return the content of an upload as text. Raises RequestRefused for long or binary content."""
    if len(body) > MAX_FILE_BYTES:
        raise RequestRefused("Invalid request", f"{name} has {len(body)} bytes, at most {MAX_FILE_BYTES} are allowed")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RequestRefused("Invalid request", f"{name} is not text")
    return text


def bundle_name(path: str, load_balancer_id: str) -> str:
    """Return the name in a bundle for the path of a file on one of Octavia's amphorae.

    Raises RequestRefused for a file of another load balancer.
    """
    directory, _, name = path.rpartition("/")
    if directory.rpartition("/")[2] != load_balancer_id or not _NAME.fullmatch(name):
        raise RequestRefused("Invalid request", f"{path} is no file of load balancer {load_balancer_id}")
    return f"tls/{load_balancer_id}/{name}"


def collect(names: Iterable[str], read: Callable[[str], str | None], load_balancer_id: str) -> tuple[File, ...]:
    """Return the files of a bundle: the named ones, and the files that their crt-lists name.

    `read` returns the content of an uploaded file; None without one. Raises RequestRefused if a file was not uploaded,
    or belongs to another load balancer.
    """
    found: dict[str, File] = {}
    pending = sorted(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        content = read(name)
        if content is None:
            raise RequestRefused("Invalid request", f"certificate file {name} was not uploaded")
        if _PEM not in content:
            paths = [line.split()[0] for line in content.splitlines() if line.split()]
            pending += [path.rpartition("/")[2] for path in paths]
            content = _rewritten(content, load_balancer_id)
        found[name] = File(f"tls/{load_balancer_id}/{name}", digest(content.encode()), content)
    return tuple(sorted(found.values(), key=lambda file: file.name))


def _rewritten(crt_list: str, load_balancer_id: str) -> str:
    lines = []
    for line in crt_list.splitlines():
        first, blank, rest = line.strip().partition(" ")
        lines.append(f"{bundle_name(first, load_balancer_id)}{blank}{rest}" if first else "")
    return "\n".join(lines) + "\n"


class Uploads:
    """The uploaded files by load balancer, each with its complete content."""

    def __init__(self, paths: Paths) -> None:
        self._root = paths.run / "octavia"

    def put(self, load_balancer_id: str, name: str, content: str) -> None:
        """Store or replace a file. Raises RequestRefused above the limit of all files, and OSError."""
        directory = self._root / load_balancer_id
        others = [path for path in directory.glob("*") if path.name != name]
        if len(others) >= MAX_FILES or sum(path.stat().st_size for path in others) + len(content) > MAX_FILES_BYTES:
            raise RequestRefused("Invalid request", "there are too many certificate files", 500)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(directory / name, content, durable=False)

    def get(self, load_balancer_id: str, name: str) -> str | None:
        with suppress(FileNotFoundError):
            return (self._root / load_balancer_id / name).read_bytes().decode()
        return None

    def delete(self, load_balancer_id: str, name: str) -> None:
        (self._root / load_balancer_id / name).unlink(missing_ok=True)

    def forget(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._root)
