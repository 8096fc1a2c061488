# SPDX-License-Identifier: Apache-2.0
"""The diagnostics document: parts within a time budget, without secrets."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SECONDS = 30.0
# HAProxy has FIRST_TIMEOUT seconds for each answer. After the first time-out, each later command has only LATER_TIMEOUT
# seconds, because HAProxy probably does not answer at all.
FIRST_TIMEOUT, LATER_TIMEOUT = 5.0, 0.3
# Maximum number of characters of one text in the diagnostics.
MOST = 6 << 20
HIDDEN = "***"
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# Words whose values are passwords or keys, which the diagnostics hide.
_SECRET_WORDS = re.compile(
    r"\b(dynamic-cookie-key|auth_pass|password|insecure-password|heartbeat_key)([ \t]*[=:][ \t]*|[ \t]+)\S+"
)
# Lines of HAProxy's `show errors` that quote received data, such as "  00000  GET / HTTP/1.1\r\n".
_CAPTURED = re.compile(r"^ +\d{5}[+ ] .*\n?", re.MULTILINE)
_SESSION = re.compile(r"\bfe=(\S+)(?: .*?\bbe=(\S+))?(?: .*?\bsrv=(\S+))?")

Part = Callable[[], Any]


class TimeBudget:
    """The time for several questions to one process. A time-out shortens the time of later questions."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._end = time.monotonic() + seconds
        self._timeout = FIRST_TIMEOUT

    def ask(self, question: Callable[[float], str]) -> str:
        """Call `question` with its time-out in seconds. Raises TimeoutError after the end of the budget."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("other parts have used the time budget")
        began = time.monotonic()
        try:
            return question(min(self._timeout, left))
        finally:
            if time.monotonic() - began >= self._timeout:
                self._timeout = LATER_TIMEOUT


def document(parts: Mapping[str, Part], secrets: Sequence[str]) -> Iterator[str]:
    """Yield one JSON object in pieces, so that only one part is in memory at a time.

    A part that fails contains its error.
    """
    yield "{"
    for number, (name, read) in enumerate(parts.items()):
        comma = ",\n" if number else ""
        yield f"{comma}{json.dumps(name)}:{json.dumps(_redact(_read_part(read), secrets))}"
    yield "}\n"


def _read_part(read: Part) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 (an operator needs the other parts)
        return {"error": f"{type(error).__name__}: {error}"}


def _redact(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        return redacted(value, secrets)
    if isinstance(value, Mapping):
        return {str(key): _redact(one, secrets) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(one, secrets) for one in value]
    return value


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Return a text of bounded length, without private keys and without these secrets."""
    if len(text) > MOST:
        text = f"{text[:MOST]}\n[cut: {len(text)} characters in total]\n"
    if "PRIVATE KEY" in text:
        text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _SECRET_WORDS.sub(rf"\1\2{HIDDEN}", text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def errors_without_content(answer: str) -> str:
    """Return HAProxy's `show errors` without the captured requests, which contain cookies."""
    return _CAPTURED.sub("", answer)


def sessions(answer: str) -> dict[str, Any]:
    """Count HAProxy's `show sess` by listener, pool and member, without client addresses."""
    counts: Counter[str] = Counter()
    for line in answer.splitlines():
        found = _SESSION.search(line)
        if found is not None:
            counts[" > ".join(word for word in found.groups() if word and word != "<none>")] += 1
    return {"total": counts.total(), "by_way": dict(counts.most_common(100))}
