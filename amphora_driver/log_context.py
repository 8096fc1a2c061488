# SPDX-License-Identifier: Apache-2.0
"""What a log line is about: load balancer, amphora and generation as fields of their own.

Invariant: whoever begins a job says once what it is about; every line written on the way has the fields, whoever writes
it, and none after. Threads that a job starts say it again: nothing is inherited by accident. Imports nothing of ours.

The plain format shows `[lb=… amphora=… gen=…]` before the message; oslo.log's JSON formatter has them as keys of
`extra`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from oslo_log import log

# Names of the fields, as JSON has them, and short, as people read them.
_SHORT = {"load_balancer": "lb", "amphora": "amphora", "generation": "gen"}
_NOTHING: Mapping[str, str | int] = {}
_subject: ContextVar[Mapping[str, str | int]] = ContextVar("amphora_log_subject", default=_NOTHING)


@contextmanager
def about(
    load_balancer: str | None = None, amphora: str | None = None, generation: int | None = None
) -> Iterator[None]:
    """Lines of this thread are about these until the block ends; what is not named stays as it was outside."""
    said = {"load_balancer": load_balancer, "amphora": amphora, "generation": generation}
    token = _subject.set({**_subject.get(), **{name: value for name, value in said.items() if value}})
    try:
        yield
    finally:
        _subject.reset(token)


def of_generation(generation: int) -> None:
    """Until the innermost `about` ends, lines are about this generation."""
    _subject.set({**_subject.get(), "generation": generation})


def subject() -> Mapping[str, str | int]:
    """What lines of this thread are about now."""
    return _subject.get()


def setup(conf: Any, name: str) -> None:
    """Set logging up as the configuration says, with our fields.

    Args:
        conf: options; those of oslo.log among them.
        name: of the program.
    """
    log.setup(conf, name)
    attach(logging.getLogger())


def attach(logger: logging.Logger) -> None:
    """Have every handler of a logger know the fields."""
    for handler in logger.handlers:
        if not any(isinstance(one, Subject) for one in handler.filters):
            handler.addFilter(Subject())


class Subject(logging.Filter):
    """Puts the fields on each line; lets every line pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        said = _subject.get()
        if said:
            # What oslo.log's plain formatter writes before the message, and the keys its JSON formatter takes over.
            words = (f"{short}={said[name]}" for name, short in _SHORT.items() if name in said)
            record.instance = f"[{' '.join(words)}] "
            record.extra_keys = [*getattr(record, "extra_keys", ()), *said]
            vars(record).update(said)
        return True
