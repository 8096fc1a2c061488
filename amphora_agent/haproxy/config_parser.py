# SPDX-License-Identifier: Apache-2.0
"""Parses a load balancer's HAProxy configuration into sections and lines.

Invariant: pure. A parsed text has ``defaults``, ``frontend`` and ``backend`` sections only, with the words that HAProxy
would read. A line that also occurs in an earlier text is the same object. So one changed line among 10,000 costs little
time.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import is_
from typing import TypeVar

from amphora_agent.directives import allowed
from amphora_agent.errors import ConfigurationRefused

# Server keywords whose value is the name of a TLS file.
FILE_KEYWORDS = ("ca-file", "crl-file", "crt")
_RELATED = frozenset({"cookie", "guid", "id", "track"})
ALLOWED = frozenset({"defaults", "frontend", "backend"})
AGENT_PREFIX = "amphora:"
"""The prefix of the names of the agent's own sections."""
# Words at which HAProxy up to version 3.2 starts a new section, even in an indented line.
_AGENT_SECTIONS = {
    "acme", "cache", "crt-store", "fcgi-app", "global", "haterm", "http-errors", "listen", "log-forward", "log-profile",
    "mailers", "peers", "program", "resolvers", "ring", "traces", "userlist",
}  # fmt: skip
_BLANKS = " \t\r\v\f"
_TO_SPACES = str.maketrans(_BLANKS, " " * len(_BLANKS))
# Characters that HAProxy may interpret, such as quotes. A line without them is split at spaces only.
_SPECIAL = re.compile(r"""[^ -~]|["#$';<\\]""")
# Tokens of a line: comments, blanks, quoted strings, escaped characters, and other text.
_TOKENS = re.compile(r"""#.*|[ \t\r\v\f]+|"(?:\\.|[^"\\])*"?|'[^']*'?|\\.?|[^ \t\r\v\f"'\\#]+""", re.DOTALL)
# Tokens that HAProxy replaces by other text, for example a variable by its value.
_AMBIGUOUS = re.compile(r"""\\[^ \\'"#]?|"[^\\$]*[\\$].*""", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """A line that is neither empty nor a comment.

    If ``plain``, HAProxy's sockets accept the words unchanged. If ``literal``, HAProxy reads exactly these words: they
    have no environment variable and no escape of another character.
    """

    words: tuple[str, ...]
    plain: bool
    literal: bool = True

    @cached_property
    def refusal(self) -> str | None:
        """The reason why the line is not allowed in a load balancer; None for an allowed line."""
        if not self.literal:
            directive = allowed.name_directive(self.words)
            return f"{directive} contains an environment variable or an escape of another character"
        return allowed.refusal(self.words)


@dataclass(frozen=True)
class Server:
    """One ``server`` line."""

    name: str
    address: str
    keywords: tuple[str, ...]
    line: Line

    def value(self, keyword: str) -> str:
        """Return the word after a keyword; empty without one."""
        if keyword not in self.keywords:
            return ""
        return next(iter(self.keywords[self.keywords.index(keyword) + 1 :]), "")

    @property
    def endpoint(self) -> tuple[str, str]:
        """The host without brackets, and the port; the address may also be a name or a path."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), port

    def _number(self, keyword: str, default: int) -> int:
        text = self.value(keyword)
        return int(text) if text.isdecimal() else default

    @property
    def weight(self) -> int:
        return self._number("weight", 1)

    @property
    def maxconn(self) -> int:
        """The connection limit; 0 for no limit."""
        return self._number("maxconn", 0)

    @property
    def disabled(self) -> bool:
        return "disabled" in self.keywords

    @property
    def checked(self) -> bool:
        return "check" in self.keywords

    @cached_property
    def files(self) -> tuple[tuple[str, str], ...]:
        """The files of the server, each with its keyword."""
        return tuple((word, self.value(word)) for word in FILE_KEYWORDS if word in self.keywords)

    @cached_property
    def related(self) -> bool:
        """Whether a keyword must be unique among all servers, or refers to another server."""
        return not _RELATED.isdisjoint(self.keywords)


Row = Line | Server | None
"""A line of the text; None for an empty line or a comment."""


@dataclass(frozen=True)
class Section:
    """A section with the number of its first line; ``servers`` has the server lines."""

    kind: str
    name: str
    head: Line
    lines: tuple[Line, ...]
    servers: tuple[Server, ...]
    number: int = field(default=0, compare=False)

    @cached_property
    def refused(self) -> bool:
        """Whether the section has a line that is not allowed in a load balancer."""
        own = any(line.refusal is not None for line in (self.head, *self.lines))
        return own or any(server.line.refusal is not None for server in self.servers)

    @cached_property
    def files(self) -> frozenset[tuple[str, str]]:
        """The files of all servers, each with its keyword."""
        return frozenset(file for server in self.servers for file in server.files)

    @cached_property
    def by_name(self) -> Mapping[str, Server]:
        """The servers by name; smaller than ``servers`` if a name occurs twice."""
        return {server.name: server for server in self.servers}

    @cached_property
    def related(self) -> bool:
        """Whether a keyword of a server must be unique among all servers, or refers to another server."""
        return any(server.related for server in self.servers)

    @property
    def object_id(self) -> str | None:
        return self.name.partition(":")[0] or None

    def setting(self, first: str) -> tuple[str, ...] | None:
        """Return the words after the last occurrence of a directive; None without one."""
        found = [line.words[1:] for line in self.lines if line.words[0] == first]
        return found[-1] if found else None


@dataclass(frozen=True)
class Configuration:
    """The sections in their order, the text, and its lines by number (from 1)."""

    sections: tuple[Section, ...]
    rows: Sequence[Row] = field(default=(), repr=False, compare=False)
    text: str = field(default="", repr=False, compare=False)

    @cached_property
    def frontends(self) -> dict[str, Section]:
        return {section.name: section for section in self.sections if section.kind == "frontend"}

    @cached_property
    def backends(self) -> dict[str, Section]:
        return {section.name: section for section in self.sections if section.kind == "backend"}

    @cached_property
    def servers(self) -> dict[tuple[str, str], Server]:
        return {(s.name, server.name): server for s in self.backends.values() for server in s.servers}

    def find_servers(self, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Server]:
        """Return the servers that exist, of these backends and names. For few servers, `servers` is slower."""
        pairs = [(key, self.backends[key[0]].by_name.get(key[1])) for key in keys if key[0] in self.backends]
        return {key: server for key, server in pairs if server is not None}

    @property
    def size(self) -> int:
        """The number of servers."""
        return sum(len(section.servers) for section in self.sections)

    @cached_property
    def server_files(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(section.files for section in self.sections))

    def _row(self, number: int) -> Row:
        return self.rows[number - 1] if 0 < number <= len(self.rows) else None

    def line_at(self, number: int) -> Line | None:
        """Return the line with a number, unless it starts a section or defines a server."""
        row = self._row(number)
        return row if isinstance(row, Line) and row.words[0] not in ALLOWED else None

    def object_at(self, number: int) -> str | None:
        """Return the id of the member, pool or listener of a line."""
        for section in reversed(self.sections):
            if section.number <= number:
                row = self._row(number)
                if isinstance(row, Server):
                    return row.name
                return section.object_id if section.kind != "defaults" else None
        return None

    def object_named(self, name: str) -> str | None:
        """Return the id of the object with a name in HAProxy, for example ``backend/server``."""
        backend, _, server = name.partition("/")
        if server and self.find_servers([(backend, server)]):
            return server
        found = self.frontends.get(backend) or self.backends.get(backend)
        return found.object_id if found else None


EMPTY = Configuration(())


def split(text: str) -> tuple[list[str], bool]:
    """Split a line as HAProxy does; return the words, and whether they are plain.

    HAProxy's sockets split commands at blanks and semicolons and know the backslash, but no quotes. No command can
    contain a word with a blank, a semicolon, an escape or a variable, so such a word is not plain.
    """
    if _SPECIAL.search(text) is None:
        return text.split(), True
    words: list[str] = []
    word: str | None = None
    plain = True
    for piece in _TOKENS.findall(text):
        if piece[0] == "#":
            break
        if piece[0] in _BLANKS:
            words += [] if word is None else [word]
            word = None
            continue
        literal = _unquoted(piece) if piece[0] in "\"'\\" else piece
        word = (word or "") + literal
        plain = plain and piece[0] != "\\" and (piece[0] == "'" or not set("$\\") & set(piece)) and _is_plain(literal)
    words += [] if word is None else [word]
    return words, plain and "" not in words


def _is_plain(literal: str) -> bool:
    return literal.isascii() and literal.isprintable() and not set(" ;\\<") & set(literal)


def _unquoted(piece: str) -> str:
    if piece[0] == "'":
        return piece[1:].removesuffix("'")
    return re.sub(r"\\(.?)", r"\1", piece[1:].removesuffix('"') if piece[0] == '"' else piece)


def parse(text: str, before: Configuration | None = None) -> Configuration:
    """Read a load balancer's configuration. A similar earlier one (`before`) saves time.

    Raises ConfigurationRefused if a section is reserved for the agent, or a line cannot be interpreted safely.
    """
    before = before or EMPTY
    rows, same = _read(text, before)
    heads = _section_starts(rows, same, before)
    former = {(section.kind, section.name): section for section in before.sections}
    reused = _unchanged_sections(same, len(rows), before)
    sections = tuple(
        reused.get((begin, end)) or _section(rows, begin, end, former)
        for begin, end in itertools.pairwise([*heads, len(rows)])
    )
    times = Counter((section.kind, section.name) for section in sections if section.kind != "defaults")
    for section in sections:
        if times[section.kind, section.name] > 1:
            raise _refusal(section.number, f"{section.kind} '{section.name}' is defined twice", section.object_id)
    return Configuration(sections, rows, text)


@dataclass(frozen=True)
class CommonLines:
    """The numbers of lines and characters that two texts share at the start and the end."""

    first: int = 0
    last: int = 0
    begin: int = 0
    end: int = 0


def common_lines(old: str, new: str) -> CommonLines:
    """Return the common lines of two texts, by a comparison of long parts."""
    begin = old.rfind("\n", 0, _common(old, new, 0)) + 1
    length = _common(old, new, begin, backwards=True)
    tail = new[len(new) - length :]
    whole = tail.find("\n") + 1
    if not whole:
        return CommonLines(old.count("\n", 0, begin), begin=begin)
    return CommonLines(old.count("\n", 0, begin), 1 + tail.count("\n", whole), begin, length - whole)


def _common(old: str, new: str, spare: int, *, backwards: bool = False) -> int:
    """Return the number of common characters at one end, without `spare` ones at the other end."""
    low, high = 0, min(len(old), len(new)) - spare
    while low < high:
        middle = (low + high + 1) // 2
        if backwards:
            equal = old[len(old) - middle : len(old) - low] == new[len(new) - middle : len(new) - low]
        else:
            equal = old[low:middle] == new[low:middle]
        low, high = (middle, high) if equal else (low, middle - 1)
    return low


def _section_starts(rows: Sequence[Row], same: CommonLines, before: Configuration) -> list[int]:
    known = [section.number - 1 for section in before.sections]
    kept, more = len(before.rows) - same.last, len(rows) - len(before.rows)
    changed = range(same.first, len(rows) - same.last)
    return [
        *(begin for begin in known if begin < same.first),
        *(n for n in changed if isinstance(row := rows[n], Line) and row.words[0] in ALLOWED),
        *(begin + more for begin in known if begin >= kept),
    ]


def _unchanged_sections(same: CommonLines, length: int, before: Configuration) -> dict[tuple[int, int], Section]:
    """Return the unchanged sections by their start and end in the new text."""
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
    head = rows[begin]
    assert isinstance(head, Line)  # noqa: S101 - `_section_starts` returns only rows of type Line
    if len(head.words) < 2 and head.words[0] != "defaults":
        raise _refusal(begin + 1, f"a {head.words[0]} section without a name")
    if head.words[1:] and head.words[1].startswith(AGENT_PREFIX):
        raise _refusal(begin + 1, f"names that begin with '{AGENT_PREFIX}' are reserved for the agent")
    kind, name = head.words[0], " ".join(head.words[1:])
    body = rows[begin + 1 : end]
    lines = tuple([row for row in body if isinstance(row, Line)])
    servers = tuple([row for row in body if isinstance(row, Server)])
    if (was := former.get((kind, name))) is not None:
        lines, servers = _reuse_if_same(was.lines, lines), _reuse_if_same(was.servers, servers)
    section = Section(kind, name, head, lines, servers, number=begin + 1)
    if was is not None:
        _derive(section, was)
    return section


def _derive(section: Section, was: Section) -> None:
    """Set the cached properties of a section from those of the former section.

    Without this, one changed server among 10,000 would take four milliseconds.
    """
    gone, different = changed_range(was.servers, section.servers)
    known = vars(section)
    if not was.refused and not was.files:
        rows = (section.head, *section.lines, *(server.line for server in different))
        known["refused"] = any(line.refusal is not None for line in rows)
        known["files"] = frozenset(file for server in different for file in server.files)
    if not was.related:
        known["related"] = any(server.related for server in different)
    if len(was.by_name) == len(was.servers):
        by_name = dict(was.by_name)
        for server in gone:
            del by_name[server.name]
        known["by_name"] = by_name | {server.name: server for server in different}


def changed_range(old: Sequence[Server], new: Sequence[Server]) -> tuple[Sequence[Server], Sequence[Server]]:
    """Return the old and the new servers between the common servers at the start and at the end."""
    first = _common_length(old, new)
    last = min(_common_length(old[::-1], new[::-1]), min(len(old), len(new)) - first)
    return old[first : len(old) - last], new[first : len(new) - last]


def _common_length(old: Sequence[Server], new: Sequence[Server]) -> int:
    same = list(map(is_, old, new))
    return len(same) if all(same) else same.index(False)


_Item = TypeVar("_Item", Line, Server)


def _reuse_if_same(old: tuple[_Item, ...], new: tuple[_Item, ...]) -> tuple[_Item, ...]:
    return old if len(old) == len(new) and all(map(is_, old, new)) else new


def _read(text: str, before: Configuration) -> tuple[list[Row], CommonLines]:
    same = common_lines(before.text, text) if before.rows else CommonLines()
    kept = len(before.rows) - same.last
    new, old = (_lines(each, same) for each in (text, before.text))
    # The parser reuses the object of an old line for a new line with the same text, even at another place.
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
        raise _refusal(first[0], f"'{word}' starts no section that a load balancer may have")
    return rows, same


def _lines(text: str, same: CommonLines) -> list[str]:
    between = text[same.begin : len(text) - same.end]
    if not same.last:
        return between.split("\n")
    return between[:-1].split("\n") if between else []


def _row(raw: str, number: int) -> Row:
    words, plain = split(raw)
    if not words:
        return None
    first = words[0]
    if first in _AGENT_SECTIONS:
        raise _refusal(number, f"a '{first}' section is reserved for the agent")
    if first not in ALLOWED and raw[0] not in _BLANKS:
        raise _refusal(number, f"'{first}' starts no section that a load balancer may have")
    if first.startswith(".") or _decoded_by_haproxy(raw):
        raise _refusal(number, f"HAProxy evaluates '{first}' first, so the agent cannot check the line")
    line = Line(tuple(words), plain, literal=plain or not any(map(_AMBIGUOUS.fullmatch, _TOKENS.findall(raw))))
    if first == "server" and len(words) > 2:
        return Server(name=line.words[1], address=line.words[2], keywords=line.words[3:], line=line)
    return line


def _decoded_by_haproxy(raw: str) -> bool:
    """Whether the first word is quoted, escaped or a variable, and may name a section."""
    return not set("\\\"'$").isdisjoint(raw.translate(_TO_SPACES).lstrip(" ").partition(" ")[0])


def _refusal(number: int, why: str, object_id: str | None = None) -> ConfigurationRefused:
    return ConfigurationRefused(
        "read the load balancer's configuration",
        f"line {number}: {why}",
        "The agent accepts only defaults, frontend and backend sections with indented lines.",
        object_id=object_id,
    )
