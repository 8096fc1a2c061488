# SPDX-License-Identifier: Apache-2.0
"""The files that Octavia's worker uploads: certificates with their keys, authorities, revocation lists, crt-lists.

Invariant: pure. Only files of the load balancer that is served get into a bundle, and of these only what its text
names, itself or through a crt-list. No error repeats what a file holds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

from amphora_agent.bundle import MAX_FILE_BYTES, File
from amphora_agent.errors import RequestRefused

# The worker's names are hashes and ids. The first character is no dot: no file is hidden, no directory left.
_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,90}\.pem")
_PEM = "-----BEGIN "


def checked_name(name: str) -> str:
    """A name under which a file can be uploaded.

    Raises:
        RequestRefused: it is none.
    """
    if not _NAME.fullmatch(name):
        raise RequestRefused("Filename has wrong format", f"{name!r} is no name for a file")
    return name


def checked_content(name: str, body: bytes) -> str:
    """The content of an upload.

    Raises:
        RequestRefused: it is not text, or too long.
    """
    if len(body) > MAX_FILE_BYTES:
        raise RequestRefused("Invalid request", f"{name} holds {len(body)} bytes, at most {MAX_FILE_BYTES} are taken")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise RequestRefused("Invalid request", f"{name} is not text")
    return text


def bundle_name(path: str, load_balancer_id: str) -> str:
    """The name in a bundle of a file that the worker knows by its path on an amphora of Octavia's.

    Raises:
        RequestRefused: it belongs to somebody else.
    """
    directory, _, name = path.rpartition("/")
    if directory.rpartition("/")[2] != load_balancer_id or not _NAME.fullmatch(name):
        raise RequestRefused("Invalid request", f"{path} is no file of load balancer {load_balancer_id}")
    return f"tls/{load_balancer_id}/{name}"


def collect(names: Iterable[str], read: Callable[[str], str | None], load_balancer_id: str) -> tuple[File, ...]:
    """The files of a bundle: those that are named, and what the crt-lists among them name.

    Args:
        read: gives the content that was uploaded under a name, None if there is none.

    Raises:
        RequestRefused: one that is needed was not uploaded, or is not this load balancer's.
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
        digest = hashlib.sha256(content.encode()).hexdigest()
        found[name] = File(f"tls/{load_balancer_id}/{name}", digest, content)
    return tuple(sorted(found.values(), key=lambda file: file.name))


def _rewritten(crt_list: str, load_balancer_id: str) -> str:
    """A crt-list (HAProxy manual 3.2, "crt-list") with the names of the bundle; each line begins with a file."""
    lines = []
    for line in crt_list.splitlines():
        first, blank, rest = line.strip().partition(" ")
        lines.append(f"{bundle_name(first, load_balancer_id)}{blank}{rest}" if first else "")
    return "\n".join(lines) + "\n"
