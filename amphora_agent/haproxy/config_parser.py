# SPDX-License-Identifier: Apache-2.0
"""HAProxy's configuration text as sections and lines.

Invariant: pure. A text that is read here holds nothing but ``defaults``, ``frontend`` and ``backend``
sections, as HAProxy itself would see them: words are split by HAProxy's own rules, and indentation hides no
section. What is the same as in a text that was read before is the same object, so that one changed line among 10,000
costs little more than one line.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import TypeVar

from amphora_agent.directives import allowed
from amphora_agent.errors import ConfigurationRefused

# Keywords of a server whose word is a file's name.
FILES = ("ca-file", "crl-file", "crt")
_RELATED = frozenset({"cookie", "guid", "id", "track"})
ALLOWED = frozenset({"defaults", "frontend", "backend"})
OWN = "amphora:"
"""How the names of the machine's own sections begin."""
# Every name HAProxy (up to 3.2) takes for the start of a section, wherever on the line it stands.
_SECTIONS = ALLOWED | {
    "acme",
    "cache",
    "crt-store",
    "fcgi-app",
    "global",
    "haterm",
    "http-errors",
    "listen",
    "log-forward",
    "log-profile",
    "mailers",
    "peers",
    "program",
    "resolvers",
    "ring",
    "traces",
    "userlist",
}
_MACHINE = _SECTIONS - ALLOWED
_BLANKS = " \t\r\v\f"
_TO_SPACES = str.maketrans(_BLANKS, " " * len(_BLANKS))
# Without any of these a line's words are what is between its spaces, and the sockets take them as they are.
_ODD = re.compile(r"""[^ -~]|["#$';<\\]""")
# A comment, blanks, something in quotes, an escaped character, or anything else.
_PIECES = re.compile(r"""#.*|[ \t\r\v\f]+|"(?:\\.|[^"\\])*"?|'[^']*'?|\\.?|[^ \t\r\v\f"'\\#]+""", re.DOTALL)
# What HAProxy replaces by something else. The escapes that remain give the character behind the backslash.
_AMBIGUOUS = re.compile(r"""\\[^ \\'"#]?|"[^\\$]*[\\$].*""", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One line that says something.

    ``plain`` tells that HAProxy's sockets would take its words as they are, ``literal`` that HAProxy reads these words
    and no others: no environment variable and no escape of another character is in them.
    """

    words: tuple[str, ...]
    plain: bool
    literal: bool = True

    @cached_property
    def refusal(self) -> str | None:
        """Why a load balancer may not have this line; None if it may."""
        if not self.literal:
            return f"{allowed.named(self.words)} contains an environment variable or an escape of another character"
        return allowed.refusal(self.words)


@dataclass(frozen=True)
class Server:
    """One ``server`` line."""

    name: str
    address: str
    keywords: tuple[str, ...]
    line: Line

    def value(self, keyword: str, default: str = "") -> str:
        """The word after a keyword."""
        if keyword not in self.keywords:
            return default
        return next(iter(self.keywords[self.keywords.index(keyword) + 1 :]), default)

    @property
    def weight(self) -> int:
        text = self.value("weight", "1")
        return int(text) if text.isdecimal() else 1

    @property
    def maxconn(self) -> int:
        """How many connections it takes at once; 0 for as many as come."""
        text = self.value("maxconn", "0")
        return int(text) if text.isdecimal() else 0

    @property
    def disabled(self) -> bool:
        return "disabled" in self.keywords

    @property
    def checked(self) -> bool:
        return "check" in self.keywords

    @cached_property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files it uses, each with its keyword."""
        return tuple((word, self.value(word)) for word in FILES if word in self.keywords)

    @cached_property
    def related(self) -> bool:
        """Whether a keyword of it must be its own alone, or names another server."""
        return not _RELATED.isdisjoint(self.keywords)


Row = Line | Server | None
"""A line of the text; None for one that says nothing."""


@dataclass(frozen=True)
class Section:
    """A section with its lines; the lines that define servers are apart. ``number`` is that of its first line."""

    kind: str
    name: str
    head: Line
    lines: tuple[Line, ...]
    servers: tuple[Server, ...]
    number: int = field(default=0, compare=False)

    @cached_property
    def refused(self) -> bool:
        """Whether a load balancer may not have one of the lines."""
        own = any(line.refusal is not None for line in (self.head, *self.lines))
        return own or any(server.line.refusal is not None for server in self.servers)

    @property
    def object_id(self) -> str | None:
        """The listener or pool this section belongs to."""
        return self.name.partition(":")[0] or None

    def setting(self, first: str) -> tuple[str, ...] | None:
        """The words after the last line that begins with this word."""
        found = [line.words[1:] for line in self.lines if line.words[0] == first]
        return found[-1] if found else None


@dataclass(frozen=True)
class Configuration:
    """All sections in their order, the text they were read from, and its lines by number (from 1)."""

    sections: tuple[Section, ...]
    rows: Sequence[Row] = field(default=(), repr=False, compare=False)
    text: str = field(default="", repr=False, compare=False)

    def of_kind(self, kind: str) -> dict[str, Section]:
        return {section.name: section for section in self.sections if section.kind == kind}

    @cached_property
    def frontends(self) -> dict[str, Section]:
        return self.of_kind("frontend")

    @cached_property
    def backends(self) -> dict[str, Section]:
        return self.of_kind("backend")

    @cached_property
    def servers(self) -> dict[tuple[str, str], Server]:
        """Every server by backend and name."""
        return {(s.name, server.name): server for s in self.backends.values() for server in s.servers}

    @property
    def size(self) -> int:
        """How many servers there are."""
        return sum(len(section.servers) for section in self.sections)

    @cached_property
    def server_files(self) -> frozenset[tuple[str, str]]:
        """The files that servers use, each with its keyword."""
        return frozenset(file for section in self.sections for server in section.servers for file in server.files)

    def _row(self, number: int) -> Row:
        return self.rows[number - 1] if 0 < number <= len(self.rows) else None

    def line_at(self, number: int) -> Line | None:
        """The line of a section with this number, if it is no server's."""
        row = self._row(number)
        return row if isinstance(row, Line) and row.words[0] not in ALLOWED else None

    def object_at(self, number: int) -> str | None:
        """The member, pool or listener that a line of the text is about."""
        for section in reversed(self.sections):
            if section.number <= number:
                row = self._row(number)
                if isinstance(row, Server):
                    return row.name
                return section.object_id if section.kind != "defaults" else None
        return None

    def object_named(self, name: str) -> str | None:
        """The object behind one of HAProxy's names: a proxy, or ``backend/server``."""
        backend, _, server = name.partition("/")
        if server and (backend, server) in self.servers:
            return server
        found = self.frontends.get(backend) or self.backends.get(backend)
        return found.object_id if found else None


EMPTY = Configuration(())


def split(text: str) -> tuple[list[str], bool]:
    """Split a line into words as HAProxy does.

    Returns:
        The words, and whether they are plain. The sockets split commands at blanks and semicolons and know a
        backslash, but no quotes: a word that holds one of these, or is not all literal here (escapes, variables), is
        split well enough to see a line's keywords, but cannot be said there.
    """
    if _ODD.search(text) is None:
        return text.split(), True
    words: list[str] = []
    word: str | None = None
    plain = True
    for piece in _PIECES.findall(text):
        if piece[0] == "#":
            break
        if piece[0] in _BLANKS:
            words += [] if word is None else [word]
            word = None
            continue
        literal = _unquoted(piece) if piece[0] in "\"'\\" else piece
        word = (word or "") + literal
        plain = plain and piece[0] != "\\" and (piece[0] == "'" or not set("$\\") & set(piece)) and _sayable(literal)
    words += [] if word is None else [word]
    return words, plain and "" not in words


def _sayable(literal: str) -> bool:
    return literal.isascii() and literal.isprintable() and not set(" ;\\<") & set(literal)


def _unquoted(piece: str) -> str:
    if piece[0] == "'":
        return piece[1:].removesuffix("'")
    return re.sub(r"\\(.?)", r"\1", piece[1:].removesuffix('"') if piece[0] == '"' else piece)


def parse(text: str, before: Configuration | None = None) -> Configuration:
    """Read a load balancer's configuration.

    Args:
        before: one that was read earlier, and most likely holds most of this text.

    Raises:
        ConfigurationRefused: it holds a section that belongs to the machine, or something that cannot be
        judged.
    """
    before = before or EMPTY
    rows, same = _read(text, before)
    heads = _heads(rows, same, before)
    former = {(section.kind, section.name): section for section in before.sections}
    reused = _reusable(same, len(rows), before)
    sections = tuple(
        reused.get((begin, end)) or _section(rows, begin, end, former)
        for begin, end in itertools.pairwise([*heads, len(rows)])
    )
    times = Counter((section.kind, section.name) for section in sections if section.kind != "defaults")
    for section in sections:
        if times[section.kind, section.name] > 1:
            raise _refused(section.number, f"{section.kind} '{section.name}' is defined twice", section.object_id)
    return Configuration(sections, rows, text)


@dataclass(frozen=True)
class Same:
    """So many lines at the beginning and at the end of two texts are the same; and how many characters these are."""

    first: int = 0
    last: int = 0
    begin: int = 0
    end: int = 0


def common(old: str, new: str) -> Same:
    """Which lines of two texts are the same without being looked at one by one."""
    begin = old.rfind("\n", 0, _common(old, new, 0)) + 1
    length = _common(old, new, begin, backwards=True)
    tail = new[len(new) - length :]
    whole = tail.find("\n") + 1  # behind the first line's end begins a line, in both
    if not whole:
        return Same(old.count("\n", 0, begin), begin=begin)
    return Same(old.count("\n", 0, begin), 1 + tail.count("\n", whole), begin, length - whole)


def _common(old: str, new: str, spare: int, *, backwards: bool = False) -> int:
    """How many characters are the same at the beginning, or at the end: by halves, as strings compare quickly.

    Args:
        spare: characters at the other side that are not to be looked at.
    """
    low, high = 0, min(len(old), len(new)) - spare
    while low < high:
        middle = (low + high + 1) // 2
        if backwards:
            equal = old[len(old) - middle : len(old) - low] == new[len(new) - middle : len(new) - low]
        else:
            equal = old[low:middle] == new[low:middle]
        low, high = (middle, high) if equal else (low, middle - 1)
    return low


def _heads(rows: Sequence[Row], same: Same, before: Configuration) -> list[int]:
    """Where sections begin, from 0."""
    known = [section.number - 1 for section in before.sections]
    kept, more = len(before.rows) - same.last, len(rows) - len(before.rows)
    changed = range(same.first, len(rows) - same.last)
    return [
        *(begin for begin in known if begin < same.first),
        *(n for n in changed if isinstance(row := rows[n], Line) and row.words[0] in ALLOWED),
        *(begin + more for begin in known if begin >= kept),
    ]


def _reusable(same: Same, length: int, before: Configuration) -> dict[tuple[int, int], Section]:
    """The sections that stand as they are in a text of so many lines, by where they begin and end there."""
    ends = itertools.chain((section.number - 1 for section in before.sections[1:]), [len(before.rows)])
    kept, more = len(before.rows) - same.last, length - len(before.rows)
    found = {}
    for section, end in zip(before.sections, ends, strict=False):
        begin = section.number - 1
        if end <= same.first:
            found[begin, end] = section
        elif begin >= kept:
            found[begin + more, end + more] = replace(section, number=section.number + more)
    return found


def _section(rows: Sequence[Row], begin: int, end: int, former: Mapping[tuple[str, str], Section]) -> Section:
    """The section of the rows from `begin`, its head, to before `end`."""
    head = rows[begin]
    assert isinstance(head, Line)  # noqa: S101 - the caller has looked
    if len(head.words) < 2 and head.words[0] != "defaults":
        raise _refused(begin + 1, f"a {head.words[0]} section without a name")
    if head.words[1:] and head.words[1].startswith(OWN):
        raise _refused(begin + 1, f"names that begin with '{OWN}' are the machine's own")
    kind, name = head.words[0], " ".join(head.words[1:])
    body = rows[begin + 1 : end]
    lines = tuple([row for row in body if isinstance(row, Line)])
    servers = tuple([row for row in body if isinstance(row, Server)])
    if (was := former.get((kind, name))) is not None:
        lines, servers = _same(was.lines, lines), _same(was.servers, servers)
    return Section(kind, name, head, lines, servers, number=begin + 1)


_Item = TypeVar("_Item", Line, Server)


def _same(old: tuple[_Item, ...], new: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """The old ones if the new ones are the very same objects."""
    return old if len(old) == len(new) and all(map(is_, old, new)) else new


def _read(text: str, before: Configuration) -> tuple[list[Row], Same]:
    """The rows of a text, and how many of them are those of another one."""
    same = common(before.text, text) if before.rows else Same()
    kept = len(before.rows) - same.last
    new, old = (_lines(each, same) for each in (text, before.text))
    # A line that has moved, or was changed in between others, is found by what it looks like.
    seen = dict(zip(old, before.rows[same.first : kept], strict=True)) if before.rows else {}
    middle: list[Row] = []
    for number, raw in enumerate(new, start=same.first + 1):
        row = seen.get(raw)
        if row is None:
            row = seen[raw] = _row(raw, number)
        middle.append(row)
    rows = [*before.rows[: same.first], *middle, *before.rows[kept:]]
    first = next(((number, row) for number, row in enumerate(rows, start=1) if row is not None), None)
    if first is not None and not (isinstance(first[1], Line) and first[1].words[0] in ALLOWED):
        word = first[1].line.words[0] if isinstance(first[1], Server) else first[1].words[0]
        raise _refused(first[0], f"'{word}' starts no section that a load balancer may have")
    return rows, same


def _lines(text: str, same: Same) -> list[str]:
    """The lines between those that are the same."""
    between = text[same.begin : len(text) - same.end]
    if not same.last:
        return between.split("\n")
    return between[:-1].split("\n") if between else []


def _row(raw: str, number: int) -> Row:
    """One line, judged as far as that does not depend on those before it."""
    words, plain = split(raw)
    if not words:
        return None
    first = words[0]
    if first in _MACHINE:
        raise _refused(number, f"a '{first}' section belongs to the machine, not to a load balancer")
    if first not in ALLOWED and raw[0] not in _BLANKS:
        raise _refused(number, f"'{first}' starts no section that a load balancer may have")
    if first.startswith(".") or _decoded_by_haproxy(raw):
        raise _refused(number, f"'{first}' is decided by HAProxy's preprocessor")
    line = Line(tuple(words), plain, literal=plain or not any(map(_AMBIGUOUS.fullmatch, _PIECES.findall(raw))))
    if first == "server" and len(words) > 2:
        return Server(name=line.words[1], address=line.words[2], keywords=line.words[3:], line=line)
    return line


def _decoded_by_haproxy(raw: str) -> bool:
    """Whether the first word is quoted, escaped or a variable, and so could become a section's name."""
    return not set("\\\"'$").isdisjoint(raw.translate(_TO_SPACES).lstrip(" ").partition(" ")[0])


def _refused(number: int, why: str, object_id: str | None = None) -> ConfigurationRefused:
    return ConfigurationRefused(
        "read the load balancer's configuration",
        f"line {number}: {why}",
        "Only defaults, frontend and backend sections, their lines indented, are accepted.",
        object_id=object_id,
    )
