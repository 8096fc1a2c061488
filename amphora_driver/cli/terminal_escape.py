# SPDX-License-Identifier: Apache-2.0
"""What a terminal is given.

Invariant: names, reasons, configurations and what amphorae say of themselves are strangers' words, and a terminal obeys
some of what is written to it (ECMA-48). Nothing that cannot be printed reaches it as it is. What is shown instead is
what JSON (RFC 8259, section 7) means by the same: documents for programs stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Iterable

# What commands themselves write between lines and columns.
_LAYOUT = "\n\t"


def plain(text: str, keep: str = "") -> str:
    r"""A text with everything that cannot be printed as its escape, such as `\u001b`.

    Args:
        text: anybody's.
        keep: characters that stay as they are all the same.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escaped(one) for one in text)


def _escaped(one: str) -> str:
    number = ord(one)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class Screen:
    """A stream that gives its own stream printable text only; in everything else it is that stream.

    Args:
        stream: for people, perhaps a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write; returns how many characters were given."""
        self._stream.write(plain(text, _LAYOUT))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def screened(stream: TextIO) -> TextIO:
    """A stream on which nothing else than text can arrive."""
    return cast("TextIO", Screen(stream))
