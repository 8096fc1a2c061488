# SPDX-License-Identifier: Apache-2.0
"""A text for HAProxy to check, without the servers that it has read before.

Invariant: pure. What HAProxy says of the abridged text it would say of the whole one: a server is left out only if a
text that HAProxy accepted has the very same line in the same backend, and if nothing there is about more than one
server. Every line keeps its number. (HAProxy 2.6 compares each server of a backend with each: 10,000 of them take it a
second and more to read, a change of one of them some milliseconds.)
"""

from __future__ import annotations

from operator import attrgetter

from amphora_agent.haproxy.config_parser import Configuration, Section, Server

# Fewer are read sooner than it takes to find out which of them were read before.
FEWEST = 50
# Keywords of a server that are about servers of other backends, too.
_FAR = frozenset({"guid", "track"})
# Lines of a backend that name servers, or make some; and how what asks for a server's state begins (manual, 7.3.2),
# which may stand in any section.
_NAMING = frozenset({"use-server", "force-persist", "ignore-persist", "server-template"})
_ASKING = "srv_"


def abridge(text: str, wanted: Configuration, accepted: Configuration) -> str:
    """The text to check in place of another one.

    Args:
        text: what HAProxy is to run, and `wanted` what it says.
        accepted: what HAProxy runs, and has read as a whole or step by step; `wanted` was read beside it.
    """
    if wanted.size < FEWEST or any(_asks(section) for section in wanted.sections):
        return text
    lines = text.split("\n")
    ends = (*(section.number for section in wanted.sections[1:]), len(wanted.rows) + 1)
    for section, end in zip(wanted.sections, ends, strict=True):
        was = accepted.backends.get(section.name) if section.kind == "backend" and _is_simple(section) else None
        known = set(map(id, was.servers)) if was is not None else set()  # the same line is the same object
        if any(server.related and id(server) not in known and _is_far(server) for server in section.servers):
            return text
        if known:
            first, last = section.number - 1, end - 1
            rows = zip(wanted.rows[first:last], lines[first:last], strict=True)
            lines[first:last] = ["" if id(row) in known else line for row, line in rows]
    return "\n".join(lines)


def _is_far(server: Server) -> bool:
    return not _FAR.isdisjoint(server.keywords)


def _asks(section: Section) -> bool:
    return any(_ASKING in word for line in section.lines for word in line.words)


def _is_simple(section: Section) -> bool:
    """Whether each of its servers can be judged by itself."""
    names = {server.name for server in section.servers}
    return (
        len(names) == len(section.servers)
        and not any(line.words[0] in _NAMING for line in section.lines)
        and not any(map(attrgetter("related"), section.servers))
    )
