# SPDX-License-Identifier: Apache-2.0
"""HAProxy's configuration text as sections and lines.

Invariant: pure. A text that is read here holds nothing but ``defaults``, ``frontend`` and ``backend``
sections, as HAProxy itself would see them: words are split by HAProxy's own rules, and indentation hides no
section.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from amphora_agent.errors import ConfigurationRefused

# Keywords of a server whose word is a file's name.
FILES = ("ca-file", "crl-file", "crt")
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
_BLANKS = " \t\r\v\f"
# A comment, blanks, something in quotes, an escaped character, or anything else.
_PIECES = re.compile(r"""#.*|[ \t\r\v\f]+|"(?:\\.|[^"\\])*"?|'[^']*'?|\\.?|[^ \t\r\v\f"'\\#]+""", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """One line that says something. ``plain`` tells that HAProxy's sockets would take its words as they are."""

    number: int
    words: tuple[str, ...]
    plain: bool


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
    def disabled(self) -> bool:
        return "disabled" in self.keywords

    @property
    def checked(self) -> bool:
        return "check" in self.keywords


@dataclass(frozen=True)
class Section:
    """A section with its lines; the lines that define servers are apart."""

    kind: str
    name: str
    head: Line
    lines: tuple[Line, ...]
    servers: tuple[Server, ...]

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
    """All sections in their order."""

    sections: tuple[Section, ...]

    def of_kind(self, kind: str) -> dict[str, Section]:
        return {section.name: section for section in self.sections if section.kind == kind}

    @property
    def frontends(self) -> dict[str, Section]:
        return self.of_kind("frontend")

    @property
    def backends(self) -> dict[str, Section]:
        return self.of_kind("backend")

    @property
    def servers(self) -> dict[tuple[str, str], Server]:
        """Every server by backend and name."""
        return {(s.name, server.name): server for s in self.backends.values() for server in s.servers}

    @cached_property
    def server_files(self) -> frozenset[tuple[str, str]]:
        """The files that servers use, each with its keyword."""
        servers = (server for section in self.sections for server in section.servers)
        return frozenset((word, s.value(word)) for s in servers for word in FILES if word in s.keywords)

    def line_at(self, number: int) -> Line | None:
        """The line of a section with this number, if it is no server's."""
        for section in self.sections:
            for line in section.lines:
                if line.number == number:
                    return line
        return None

    def object_at(self, number: int) -> str | None:
        """The member, pool or listener that a line of the text is about."""
        for section in reversed(self.sections):
            if section.head.number <= number:
                for server in section.servers:
                    if server.line.number == number:
                        return server.name
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


def parse(text: str) -> Configuration:
    """Read a load balancer's configuration.

    Raises:
        ConfigurationRefused: it holds a section that belongs to the machine, or something that cannot be
        judged.
    """
    sections: list[Section] = []
    for head, body in _raw_sections(text):
        if len(head.words) < 2 and head.words[0] != "defaults":
            raise _refused(head.number, f"a {head.words[0]} section without a name")
        if head.words[1:] and head.words[1].startswith(OWN):
            raise _refused(head.number, f"names that begin with '{OWN}' are the machine's own")
        sections.append(
            Section(
                kind=head.words[0],
                name=" ".join(head.words[1:]),
                head=head,
                lines=tuple(line for line in body if not _is_server(line)),
                servers=tuple(_server(line) for line in body if _is_server(line)),
            )
        )
    times = Counter((section.kind, section.name) for section in sections if section.kind != "defaults")
    for section in sections:
        if times[section.kind, section.name] > 1:
            raise _refused(section.head.number, f"{section.kind} '{section.name}' is defined twice", section.object_id)
    return Configuration(tuple(sections))


def _raw_sections(text: str) -> Iterator[tuple[Line, list[Line]]]:
    head: Line | None = None
    body: list[Line] = []
    for line in _lines(text):
        if line.words[0] in _SECTIONS:
            if head is not None:
                yield head, body
            head, body = line, []
        else:
            body.append(line)
    if head is not None:
        yield head, body


def _lines(text: str) -> Iterator[Line]:
    inside = False
    for number, raw in enumerate(text.split("\n"), start=1):
        words, plain = split(raw)
        if not words:
            continue
        first = words[0]
        if first in _SECTIONS - ALLOWED:
            raise _refused(number, f"a '{first}' section belongs to the machine, not to a load balancer")
        if first not in ALLOWED and (raw[0] not in _BLANKS or not inside):
            raise _refused(number, f"'{first}' starts no section that a load balancer may have")
        if first.startswith(".") or _decoded_by_haproxy(raw):
            raise _refused(number, f"'{first}' is decided by HAProxy's preprocessor")
        inside = True
        yield Line(number, tuple(words), plain)


def _decoded_by_haproxy(raw: str) -> bool:
    """Whether the first word is quoted, escaped or a variable, and so could become a section's name."""
    blank = str.maketrans(_BLANKS, " " * len(_BLANKS))
    return not set("\\\"'$").isdisjoint(raw.translate(blank).lstrip(" ").partition(" ")[0])


def _refused(number: int, why: str, object_id: str | None = None) -> ConfigurationRefused:
    return ConfigurationRefused(
        "read the load balancer's configuration",
        f"line {number}: {why}",
        "Only defaults, frontend and backend sections, their lines indented, are accepted.",
        object_id=object_id,
    )


def _is_server(line: Line) -> bool:
    return line.words[0] == "server" and len(line.words) > 2


def _server(line: Line) -> Server:
    return Server(name=line.words[1], address=line.words[2], keywords=line.words[3:], line=line)
