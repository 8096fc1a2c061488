# SPDX-License-Identifier: Apache-2.0
"""A text for HAProxy to check, without the servers that it has read before.

Invariant: pure. What HAProxy says of the abridged text it would say of the whole one: a server is left out only if a
text that HAProxy accepted has the very same line in the same backend, and if nothing there is about more than one
server. Every line keeps its number. (HAProxy 2.6 compares each server of a backend with each: 10,000 of them take it a
second and more to read, a change of one of them some milliseconds.)
"""

from __future__ import annotations

from amphora_agent.haproxy.configuration import Configuration, Section

# Fewer are read sooner than it takes to find out which of them were read before.
FEWEST = 50
# Keywords of a server that must be its own alone, or that name another one; and a backend's, which name servers.
_SHARED = frozenset({"cookie", "guid", "id", "track"})
_NAMING = frozenset({"use-server", "force-persist", "ignore-persist"})


def abridge(text: str, wanted: Configuration, accepted: Configuration) -> str:
    """The text to check in place of another one.

    Args:
        text: what HAProxy is to run, and `wanted` what it says.
        accepted: what HAProxy runs, and has read as a whole or step by step; `wanted` was read beside it.
    """
    if len(wanted.servers) < FEWEST:
        return text
    lines = text.split("\n")
    ends = (*(section.number for section in wanted.sections[1:]), len(wanted.rows) + 1)
    for section, end in zip(wanted.sections, ends, strict=True):
        was = accepted.backends.get(section.name)
        if section.kind != "backend" or was is None or not _is_simple(section):
            continue
        known = set(map(id, was.servers))  # the same line is the same object
        for number in range(section.number, end):
            if id(wanted.rows[number - 1]) in known:
                lines[number - 1] = ""
    return "\n".join(lines)


def _is_simple(section: Section) -> bool:
    """Whether each of its servers can be judged by itself."""
    names = {server.name for server in section.servers}
    return (
        len(names) == len(section.servers)
        and not any(line.words[0] in _NAMING for line in section.lines)
        and all(_SHARED.isdisjoint(server.keywords) for server in section.servers)
    )
