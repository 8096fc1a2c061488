# SPDX-License-Identifier: Apache-2.0
"""HAProxy's file as it is on disk: a head of ours, then the load balancer's text.

Invariant: pure. The head names the directory of the files that the text needs and the limits of the process, so that
all of them are checked together and change together, by the renaming of one file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from amphora_agent.haproxy.configuration import OWN

_END_OF_HEAD = "# From here on: the load balancer's part.\n"
_NEVER_BOUND = 9103
_ORIGIN = re.compile(r"^    default-path origin (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    """A head and a text."""

    head: str
    text: str

    @property
    def content(self) -> str:
        return self.head + self.text

    @property
    def files(self) -> Path | None:
        """The directory it takes its files from."""
        found = _ORIGIN.search(self.head)
        return Path(found.group(1)) if found else None

    def line(self, number: int) -> int:
        """A line of the whole as a line of the text; below 1 in the head."""
        return number - self.head.count("\n")


def compose(text: str, *, files: Path, maxconn: int, threads: int, certificates: Iterable[str]) -> Document:
    """The document for a text.

    Args:
        files: the directory of the files that the text names.
        certificates: those of them that servers show. HAProxy (2.6) opens a server's certificate only after it has read
            the configuration and left this directory; so a frontend that is never bound has it opened before, and
            the server finds it in memory, under the same name.
    """
    head = (
        "# What the load balancer's part needs of this machine. Written by the agent.\n"
        "global\n"
        f"    default-path origin {files}\n"
        f"    maxconn {maxconn}\n"
        f"    nbthread {threads}\n"
    )
    binds = "".join(f"    bind 127.0.0.1:{_NEVER_BOUND} ssl crt {name}\n" for name in certificates)
    if binds:
        head += f"frontend {OWN}certificates\n    disabled\n{binds}"
    return Document(head + _END_OF_HEAD, text)


def read(content: str) -> Document:
    """Take a file apart again."""
    head, end, text = content.partition(_END_OF_HEAD)
    return Document(head + end, text) if end else Document("", content)
