# SPDX-License-Identifier: Apache-2.0
"""Shortens a text for the check by HAProxy: omits servers that HAProxy has checked before.

Invariant: pure. HAProxy accepts the short text only if it accepts the whole one: a server is omitted only if an
accepted text has the same line in the same backend, and if nothing in that backend refers to more than one server.
Each line keeps its number. (HAProxy 2.6 compares each server of a backend with each other: it reads 10,000 servers in
a second or more, and one changed server in some milliseconds.)
"""

from __future__ import annotations

from operator import attrgetter

from amphora_agent.haproxy.config_parser import Configuration, Section, Server

# Below this number of servers a full check is faster than the comparison.
MIN_SERVERS = 50
# Keywords of a server that also refer to servers of other backends.
_GLOBAL_KEYWORDS = frozenset({"guid", "track"})
# Directives of a backend that refer to servers or create some, and the prefix of the fetches of a server's state
# (manual, 7.3.2), which any section may contain.
_REFERRING = frozenset({"use-server", "force-persist", "ignore-persist", "server-template"})
_STATE_FETCH = "srv_"


def omit_checked_servers(text: str, wanted: Configuration, accepted: Configuration) -> str:
    """Return a text whose check has the same result as the check of the whole one.

    Args:
        text: the text of `wanted`.
        accepted: the running configuration; `wanted` was parsed after it, so equal lines are the same objects.
    """
    if wanted.size < MIN_SERVERS or any(_fetches_server_state(section) for section in wanted.sections):
        return text
    lines = text.split("\n")
    ends = (*(section.number for section in wanted.sections[1:]), len(wanted.rows) + 1)
    for section, end in zip(wanted.sections, ends, strict=True):
        was = accepted.backends.get(section.name) if section.kind == "backend" and _is_simple(section) else None
        known = set(map(id, was.servers)) if was is not None else set()  # the same line is the same object
        if any(
            server.related and id(server) not in known and _refers_to_other_backends(server)
            for server in section.servers
        ):
            return text
        if known:
            first, last = section.number - 1, end - 1
            rows = zip(wanted.rows[first:last], lines[first:last], strict=True)
            lines[first:last] = ["" if id(row) in known else line for row, line in rows]
    return "\n".join(lines)


def _refers_to_other_backends(server: Server) -> bool:
    return not _GLOBAL_KEYWORDS.isdisjoint(server.keywords)


def _fetches_server_state(section: Section) -> bool:
    return any(_STATE_FETCH in word for line in section.lines for word in line.words)


def _is_simple(section: Section) -> bool:
    """Whether HAProxy checks each server of the backend independently of the others."""
    names = {server.name for server in section.servers}
    return (
        len(names) == len(section.servers)
        and not any(line.words[0] in _REFERRING for line in section.lines)
        and not any(map(attrgetter("related"), section.servers))
    )
