# SPDX-License-Identifier: Apache-2.0
"""HAProxy's configuration read back into words, as section 2.2 of its manual says, and checked by HAProxy itself.

Written from the manual, not from the renderer: the two agree only if both are right.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


def words(line: str) -> list[str]:  # noqa: C901 - the reader is one state machine
    result: list[str] = []
    word: list[str] | None = None
    quote = ""
    i = 0
    while i < len(line):
        c = line[i]
        if quote:
            if c == quote:
                quote = ""
            elif quote == '"' and c in "\\$":
                raise AssertionError("weak quotes are not used")
            else:
                word.append(c)
        elif c in "'\"":
            quote, word = c, word if word is not None else []
        elif c == "\\":
            i += 1
            assert line[i] != "x", "hexadecimal escapes are not used"
            word = [*(word or []), _ESCAPES.get(line[i], line[i])]
        elif c == "#":
            break
        elif c in " \t":
            if word is not None:
                result.append("".join(word))
            word = None
        else:
            word = [*(word or []), c]
        i += 1
    assert not quote, f"an open quote in {line!r}"
    if word is not None:
        result.append("".join(word))
    return result


def directives(text: str) -> list[list[str]]:
    return [found for line in text.split("\n") if (found := words(line))]


def haproxy_takes(text: str, folder: Path) -> None:
    state, top, body = folder / "state", folder / "global.cfg", folder / "lb.cfg"
    state.write_text("1\n")
    top.write_text(f"global\n    server-state-file {state}\n")
    body.write_text(text)
    command = ["haproxy", "-c", "-dW", "-f", str(top), "-f", str(body)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
