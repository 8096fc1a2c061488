# SPDX-License-Identifier: Apache-2.0
"""How what is found out about an amphora is told: in parts, in time, and without secrets.

Invariant: pure. Whatever a part says, nothing that looks like a private key, or is known to be a secret, leaves
here; nor does what a user's clients have sent.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SECONDS = 30.0
# For one answer: of somebody who has answered so far, and of one who has not.
PATIENCE, IMPATIENCE = 5.0, 0.3
# Characters of one part that is a text.
MOST = 6 << 20
HIDDEN = "***"
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
# Words of a configuration whose value is a secret: HAProxy's cookie key, keepalived's and HAProxy's passwords.
_SECRET_WORDS = re.compile(
    r"\b(dynamic-cookie-key|auth_pass|password|insecure-password|heartbeat_key)([ \t]*[=:][ \t]*|[ \t]+)\S+"
)
# A line of the bytes that `show errors` has kept: "  00000  GET / HTTP/1.1\r\n".
_CAPTURED = re.compile(r"^ +\d{5}[+ ] .*\n?", re.MULTILINE)
_SESSION = re.compile(r"\bfe=(\S+)(?: .*?\bbe=(\S+))?(?: .*?\bsrv=(\S+))?")

Part = Callable[[], Any]


class Clock:
    """How long to wait for somebody who is asked many things: little, once an answer did not come."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._end = time.monotonic() + seconds
        self._patience = PATIENCE

    def ask(self, question: Callable[[float], str]) -> str:
        """Ask; `question` is given the seconds to wait.

        Raises:
            TimeoutError: no time is left.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("other parts have taken all the time there was")
        began = time.monotonic()
        try:
            return question(min(self._patience, left))
        finally:
            if time.monotonic() - began >= self._patience:
                self._patience = IMPATIENCE


def document(parts: Mapping[str, Part], secrets: Sequence[str]) -> Iterator[str]:
    """One JSON object, a piece for each part, so that only one part is in memory at a time.

    A part that fails says why in its place.
    """
    yield "{"
    for number, (name, read) in enumerate(parts.items()):
        comma = ",\n" if number else ""
        yield f"{comma}{json.dumps(name)}:{json.dumps(_clean(_told(read), secrets))}"
    yield "}\n"


def _told(read: Part) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 (no failure of one part may cost the others)
        return {"error": f"{type(error).__name__}: {error}"}


def _clean(value: Any, secrets: Sequence[str]) -> Any:
    """The same without secrets, and every text of a bounded length."""
    if isinstance(value, str):
        return redacted(value, secrets)
    if isinstance(value, Mapping):
        return {str(key): _clean(one, secrets) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(one, secrets) for one in value]
    return value


def redacted(text: str, secrets: Sequence[str]) -> str:
    """The same without what must not be told.

    Args:
        secrets: values that are known.
    """
    if len(text) > MOST:
        text = f"{text[:MOST]}\n[cut: {len(text)} characters in all]\n"
    if "PRIVATE KEY" in text:
        text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _SECRET_WORDS.sub(rf"\1\2{HIDDEN}", text)
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def errors_without_content(answer: str) -> str:
    """HAProxy's `show errors` without the bytes it shows: these are users' requests, with their cookies."""
    return _CAPTURED.sub("", answer)


def sessions(answer: str) -> dict[str, Any]:
    """HAProxy's `show sess`, counted by listener, pool and member; whose they are is not told."""
    counts: Counter[str] = Counter()
    for line in answer.splitlines():
        found = _SESSION.search(line)
        if found is not None:
            counts[" > ".join(word for word in found.groups() if word and word != "<none>")] += 1
    return {"total": counts.total(), "by_way": dict(counts.most_common(100))}
