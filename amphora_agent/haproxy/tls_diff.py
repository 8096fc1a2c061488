# SPDX-License-Identifier: Apache-2.0
"""What it takes to have a running HAProxy use other files: certificates, authorities, revocation lists, ticket keys.

Invariant: pure. HAProxy knows a file by the name that the text gives it, whatever directory it was read from, so names
are all that is compared here; contents only where they say which certificates there are and which ticket keys. What
cannot be done without a new worker is a hindrance, in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from amphora_agent.bundle import File
from amphora_agent.haproxy.config_parser import FILES, Configuration, Line
from amphora_agent.haproxy.runtime_actions import (
    AddTicketKeys,
    FileStep,
    ForgetFile,
    ListCertificate,
    LoadFile,
    Store,
    UnlistCertificate,
)

LARGEST = 15_000
"""Characters that one command may bring: HAProxy reads it into a buffer of 16 KiB (manual, "tune.bufsize")."""
TICKET_KEYS = 3
"""As many of the last keys of a file HAProxy knows (manual, "tls-ticket-keys")."""
_STORES: dict[str, Store] = {"crt": "cert", "ca-file": "ca-file", "crl-file": "crl-file"}
# A revocation list before the authority it is about: a client that only the new authority has issued a certificate for
# waits until both are there.
_ORDER: tuple[Store, ...] = ("crl-file", "ca-file", "cert")


@dataclass(frozen=True)
class Side:
    """One of two configurations, with its files.

    ``texts`` holds the contents of `lists` and `ticket_keys`, and of what is `changed`, where they are at hand.
    """

    configuration: Configuration
    files: tuple[File, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Changes:
    """What there is to do before servers change and after, why, and what stands in the way of it."""

    before: tuple[FileStep, ...] = ()
    after: tuple[FileStep, ...] = ()
    reasons: tuple[str, ...] = ()
    hindrances: tuple[str, ...] = ()


NONE = Changes()


def lists(configuration: Configuration) -> set[str]:
    """The lists of certificates that a configuration names."""
    return {name for keyword, name, _ in _bound(configuration) if keyword == "crt-list"}


def ticket_keys(configuration: Configuration) -> set[str]:
    """The files with TLS ticket keys that a configuration names."""
    return {name for keyword, name, _ in _bound(configuration) if keyword == "tls-ticket-keys"}


def changed(old: Sequence[File], new: Sequence[File]) -> list[str]:
    """The names of the files that are not the same in two sets."""
    before = {file.name: file for file in old}
    after = {file.name: file for file in new}
    return [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]


def changes(old: Side, new: Side) -> Changes:
    """From the files of one configuration to those of another, whose `bind` lines are the same."""
    different = changed(old.files, new.files)
    known, wanted = held(old), held(new)
    steps: list[FileStep] = []
    after: list[FileStep] = []
    hindrances: list[str] = []
    for store in _ORDER:
        loaded = sorted(
            name for kind, name in wanted if kind == store and ((kind, name) not in known or name in different)
        )
        steps += [LoadFile(store, name) for name in loaded]
        hindrances += [
            _owned(name, f"is too large to be told: {size}", new) for name in loaded if (size := _size(new, name))
        ]
    hindrances += [_owned(name, why, new) for name, why in _resumable(new.configuration, different)]
    hindrances += [_owned(name, why, new) for name, why in _kept(new.configuration, known, different)]
    for keyword, name, _ in dict.fromkeys(_bound(new.configuration)):
        if name not in different:
            continue
        if keyword == "crt-list":
            why = _relisted(name, old.texts.get(name), new.texts.get(name), steps, after)
        elif keyword == "tls-ticket-keys":
            why = _rekeyed(name, old.texts.get(name), new.texts.get(name), steps)
        else:
            continue
        hindrances += [_owned(name, why, new)] if why else []
    after += [ForgetFile(store, name) for store, name in sorted(known - wanted)]
    reasons = tuple(_reason(name, old, new) for name in different)
    return Changes(tuple(dict.fromkeys(steps)), tuple(dict.fromkeys(after)), reasons, tuple(dict.fromkeys(hindrances)))


def _bound(configuration: Configuration) -> Iterator[tuple[str, str, Line]]:
    """Every file that a `bind` line names, with its keyword."""
    for section in configuration.frontends.values():
        for line in section.lines:
            if line.words[0] == "bind":
                for keyword, name in zip(line.words, line.words[1:], strict=False):
                    if keyword in ("crt-list", "tls-ticket-keys", *FILES):
                        yield keyword, name, line


def held(side: Side) -> set[tuple[Store, str]]:
    """What HAProxy has in its memory for a configuration."""
    found = {(_STORES[keyword], name) for keyword, name in side.configuration.server_files}
    for keyword, name, _ in _bound(side.configuration):
        if keyword in _STORES:
            found.add((_STORES[keyword], name))
        elif keyword == "crt-list":
            found |= {("cert", entry[0]) for entry in entries(side.texts.get(name, ""))}
    return found


def entries(text: str) -> list[tuple[str, ...]]:
    """The lines of a list of certificates (manual, "crt-list"), as words."""
    return [tuple(words) for line in text.splitlines() if (words := line.partition("#")[0].split())]


def _size(side: Side, name: str) -> int:
    """The size of a file that is too large; 0 for one that is not."""
    size = len(side.texts.get(name, ""))
    return size if size > LARGEST else 0


def _resumable(configuration: Configuration, different: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Files that decide who may come in, on lines where somebody who was in may come back without being asked."""
    for keyword, name, line in _bound(configuration):
        if keyword in ("ca-file", "crl-file") and name in different and "no-tls-tickets" not in line.words:
            yield name, "clients could resume sessions that began before"


def _kept(
    configuration: Configuration, known: set[tuple[Store, str]], different: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Files that decide which members are believed, and as whom: HAProxy goes on using connections that it has.

    It also goes on showing members (2.6.12 and 3.0.11, but not 2.8.25) the certificate that was replaced.
    """
    for keyword, name in sorted(configuration.server_files):
        if name in different and (_STORES[keyword], name) in known:
            yield name, "connections to members that were made before would be used on"


def _relisted(name: str, old: str | None, new: str | None, steps: list[FileStep], after: list[FileStep]) -> str:
    """Add what changes a list to the steps; or say why it cannot be changed."""
    if old is None or new is None:
        return "was not served before"
    before, wanted = entries(old), entries(new)
    if not before or not wanted or before[0] != wanted[0]:
        return "begins with another certificate"
    if len(set(before)) < len(before) or len(set(wanted)) < len(wanted):
        return "names a certificate twice"
    if any(len(entry) > 1 for entry in set(before) ^ set(wanted)):
        return "says more than names"
    steps += [ListCertificate(name, entry[0]) for entry in wanted if entry not in before]
    after += [UnlistCertificate(name, entry[0]) for entry in before if entry not in wanted]
    return ""


def _rekeyed(name: str, old: str | None, new: str | None, steps: list[FileStep]) -> str:
    before, wanted = ([] if text is None else text.split()[-TICKET_KEYS:] for text in (old, new))
    if len(before) < TICKET_KEYS or len(wanted) < TICKET_KEYS:
        return "was not served before"
    if [len(key) for key in before] != [len(key) for key in wanted]:
        return "has keys of another length"
    steps += [AddTicketKeys(name, count) for count in [_shift(before, wanted)] if count]
    return ""


def _shift(before: list[str], wanted: list[str]) -> int:
    """How many new keys there are at the end."""
    return next(n for n in range(TICKET_KEYS + 1) if before[n:] == wanted[: TICKET_KEYS - n])


def _owned(name: str, why: str, side: Side) -> str:
    return f"file {name} of {_owner(name, side)} {why}"


def _reason(name: str, old: Side, new: Side) -> str:
    before, after = ({file.name for file in side.files} for side in (old, new))
    what = "is new" if name not in before else "is gone" if name not in after else "has another content"
    return _owned(name, what, new)


def _owner(name: str, side: Side) -> str:
    owner = name.split("/")[1] if "/" in name else name
    if name.endswith("/ticket.keys"):
        return f"load balancer {owner}"
    return f"{'listener' if owner in side.configuration.frontends else 'pool'} {owner}"
