# SPDX-License-Identifier: Apache-2.0
"""Log context: load balancer, amphora and generation as fields of each log line.

Invariant: the start of a job sets the fields once. All log lines of the thread have the fields until the job ends.
Threads that a job starts set the fields again. This module imports `repeated_messages` only.

The plain format shows `[lb=… amphora=… gen=…]` before the message. oslo.log's JSON formatter has a key for each field.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from oslo_log import log

from amphora_driver import repeated_messages

# The plain log format uses shorter field names than the JSON log format, for example `lb` for `load_balancer`.
_SHORT = {"load_balancer": "lb", "amphora": "amphora", "generation": "gen"}
_NOTHING: Mapping[str, str | int] = {}
_fields: ContextVar[Mapping[str, str | int]] = ContextVar("amphora_log_fields", default=_NOTHING)


@contextmanager
def about(
    load_balancer: str | None = None, amphora: str | None = None, generation: int | None = None
) -> Iterator[None]:
    """Set the fields of this thread's log lines until the block ends; None leaves a field unchanged."""
    values = {"load_balancer": load_balancer, "amphora": amphora, "generation": generation}
    token = _fields.set({**_fields.get(), **{name: value for name, value in values.items() if value}})
    try:
        yield
    finally:
        _fields.reset(token)


def set_generation(generation: int) -> None:
    """Set the generation until the innermost `about` ends."""
    _fields.set({**_fields.get(), "generation": generation})


def setup(conf: Any, name: str) -> None:
    """Configure logging of the program, with the context fields and the limit of repeated messages."""
    log.setup(conf, name)
    add_context_filter(logging.getLogger())
    # The fields are a part of a message, so this filter comes after that of the fields.
    repeated_messages.add_filter(logging.getLogger())


def add_context_filter(logger: logging.Logger) -> None:
    """Add the fields to every handler of a logger."""
    for handler in logger.handlers:
        if not any(isinstance(one, ContextFilter) for one in handler.filters):
            handler.addFilter(ContextFilter())


class ContextFilter(logging.Filter):
    """Adds the fields to each record; rejects none."""

    def filter(self, record: logging.LogRecord) -> bool:
        fields = _fields.get()
        if fields:
            # oslo.log's plain formatter prints `instance` before the message, and its JSON formatter prints the fields
            # in `extra_keys`. So both are set.
            words = (f"{short}={fields[name]}" for name, short in _SHORT.items() if name in fields)
            record.instance = f"[{' '.join(words)}] "
            record.extra_keys = [*getattr(record, "extra_keys", ()), *fields]
            vars(record).update(fields)
        return True
