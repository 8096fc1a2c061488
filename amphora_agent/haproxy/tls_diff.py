# SPDX-License-Identifier: Apache-2.0
"""Compares the TLS files of two configurations: certificates, CAs, CRLs, crt-lists, ticket keys.

Invariant: pure. HAProxy knows a file by its name in the text, so names are compared. A difference that needs a reload
is an obstacle, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from amphora_agent.bundle import File
from amphora_agent.haproxy import runtime_actions as act
from amphora_agent.haproxy.config_parser import FILE_KEYWORDS, Configuration, Line
from amphora_agent.haproxy.runtime_actions import Store

MAX_COMMAND_LENGTH = 15_000
"""HAProxy reads one command into a buffer of 16 KiB (manual, "tune.bufsize")."""
TICKET_KEYS = 3
"""HAProxy uses the last three keys of a file (manual, "tls-ticket-keys")."""
_STORES: dict[str, Store] = {"crt": "cert", "ca-file": "ca-file", "crl-file": "crl-file"}
# A revocation list is loaded before its CA, so that HAProxy never accepts a revoked certificate.
_ORDER: tuple[Store, ...] = ("crl-file", "ca-file", "cert")


@dataclass(frozen=True)
class TlsState:
    """A configuration with its TLS files.

    ``texts`` has the known contents of the files that a comparison needs.
    """

    configuration: Configuration
    files: tuple[File, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class TlsChanges:
    """Actions before and after the changes of servers, their reasons, and obstacles that need a reload."""

    before: tuple[act.FileAction, ...] = ()
    after: tuple[act.FileAction, ...] = ()
    reasons: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


NO_CHANGES = TlsChanges()


def files_of_binds(configuration: Configuration, wanted: str) -> set[str]:
    """Return the files of a keyword, for example "crt-list", on the `bind` lines."""
    return {name for keyword, name, _ in _bind_files(configuration) if keyword == wanted}


def changed_names(old: Sequence[File], new: Sequence[File]) -> list[str]:
    """Return the names of the files that differ between two sets."""
    before = {file.name: file for file in old}
    after = {file.name: file for file in new}
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def compare_files(old: TlsState, new: TlsState) -> TlsChanges:
    """Compare the files of two configurations with the same `bind` lines."""
    different = changed_names(old.files, new.files)
    known, wanted = stored_names(old), stored_names(new)
    actions: list[act.FileAction] = []
    after: list[act.FileAction] = []
    obstacles: list[str] = []
    for store in _ORDER:
        loaded = sorted(
            name for kind, name in wanted if kind == store and ((kind, name) not in known or name in different)
        )
        actions += [act.LoadFile(store, name) for name in loaded]
        obstacles += [
            _describe(name, f"has {size} characters, too many for the stats socket", new)
            for name in loaded
            if (size := len(new.texts.get(name, ""))) > MAX_COMMAND_LENGTH
        ]
    obstacles += [_describe(name, why, new) for name, why in _session_obstacles(new.configuration, different)]
    obstacles += [_describe(name, why, new) for name, why in _connection_obstacles(new.configuration, known, different)]
    for keyword, name, _ in dict.fromkeys(_bind_files(new.configuration)):
        if name not in different:
            continue
        if keyword == "crt-list":
            why = _compare_crt_list(name, old.texts.get(name), new.texts.get(name), actions, after)
        elif keyword == "tls-ticket-keys":
            why = _compare_ticket_keys(name, old.texts.get(name), new.texts.get(name), actions)
        else:
            continue
        obstacles += [_describe(name, why, new)] if why else []
    after += [act.UnloadFile(store, name) for store, name in sorted(known - wanted)]
    reasons = tuple(_reason(name, old, new) for name in different)
    before = tuple(dict.fromkeys(actions))
    return TlsChanges(before, tuple(dict.fromkeys(after)), reasons, tuple(dict.fromkeys(obstacles)))


def _bind_files(configuration: Configuration) -> Iterator[tuple[str, str, Line]]:
    """Yield each file of a `bind` line, with its keyword and the line."""
    for section in configuration.frontends.values():
        for line in section.lines:
            if line.words[0] == "bind":
                for keyword, name in zip(line.words, line.words[1:], strict=False):
                    if keyword in ("crt-list", "tls-ticket-keys", *FILE_KEYWORDS):
                        yield keyword, name, line


def stored_names(side: TlsState) -> set[tuple[Store, str]]:
    """Return the files in HAProxy's memory for a configuration."""
    found = {(_STORES[keyword], name) for keyword, name in side.configuration.server_files}
    for keyword, name, _ in _bind_files(side.configuration):
        if keyword in _STORES:
            found.add((_STORES[keyword], name))
        elif keyword == "crt-list":
            found |= {("cert", entry[0]) for entry in crt_list_entries(side.texts.get(name, ""))}
    return found


def crt_list_entries(text: str) -> list[tuple[str, ...]]:
    """Return the lines of a crt-list (manual, "crt-list"), as words."""
    return [tuple(words) for line in text.splitlines() if (words := line.partition("#")[0].split())]


def _session_obstacles(configuration: Configuration, different: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield changed client CAs and CRLs on lines with session tickets.

    A ticket bypasses the check with the new CA or CRL.
    """
    for keyword, name, line in _bind_files(configuration):
        if keyword in ("ca-file", "crl-file") and name in different and "no-tls-tickets" not in line.words:
            yield name, "clients could resume sessions that began before the change"


def _connection_obstacles(
    configuration: Configuration, known: set[tuple[Store, str]], different: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield changed files of servers: HAProxy continues to use connections with the old content.

    HAProxy 2.6.12 and 3.0.11, but not 2.8.25, also continue to present the replaced client certificate to members.
    """
    for keyword, name in sorted(configuration.server_files):
        if name in different and (_STORES[keyword], name) in known:
            yield name, "connections to members from before the change would stay in use"


def _compare_crt_list(
    name: str, old: str | None, new: str | None, actions: list[act.FileAction], after: list[act.FileAction]
) -> str:
    """Append the actions for a crt-list; return the reason of an obstacle, or an empty text."""
    if old is None or new is None:
        return "was not served before"
    before, wanted = crt_list_entries(old), crt_list_entries(new)
    if not before or not wanted or before[0] != wanted[0]:
        return "begins with another certificate"
    if len(set(before)) < len(before) or len(set(wanted)) < len(wanted):
        return "names a certificate twice"
    if any(len(entry) > 1 for entry in set(before) ^ set(wanted)):
        return "has options besides names"
    actions += [act.AddToCrtList(name, entry[0]) for entry in wanted if entry not in before]
    after += [act.RemoveFromCrtList(name, entry[0]) for entry in before if entry not in wanted]
    return ""


def _compare_ticket_keys(name: str, old: str | None, new: str | None, actions: list[act.FileAction]) -> str:
    before, wanted = ([] if text is None else text.split()[-TICKET_KEYS:] for text in (old, new))
    if len(before) < TICKET_KEYS or len(wanted) < TICKET_KEYS:
        return "was not served before"
    if [len(key) for key in before] != [len(key) for key in wanted]:
        return "has keys of another length"
    count = next(new for new in range(TICKET_KEYS + 1) if before[new:] == wanted[: TICKET_KEYS - new])
    actions += [act.AddTicketKeys(name, count)] if count else []
    return ""


def _describe(name: str, why: str, side: TlsState) -> str:
    return f"file {name} of {_owner(name, side)} {why}"


def _reason(name: str, old: TlsState, new: TlsState) -> str:
    before, after = ({file.name for file in side.files} for side in (old, new))
    what = "is new" if name not in before else "was removed" if name not in after else "has another content"
    return _describe(name, what, new)


def _owner(name: str, side: TlsState) -> str:
    owner = name.split("/")[1] if "/" in name else name
    if name.endswith("/ticket.keys"):
        return f"load balancer {owner}"
    return f"{'listener' if owner in side.configuration.frontends else 'pool'} {owner}"
