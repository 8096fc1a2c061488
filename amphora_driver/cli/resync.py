# SPDX-License-Identifier: Apache-2.0
"""Bringing load balancers and Octavia together again.

Invariant: this writes down what is asked for, and nothing else: the provider agent does it, now or when it is back.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa
from cliff.lister import Lister

from amphora_driver.cli import id_prefix
from amphora_driver.cli.failover_request import who_where
from amphora_driver.cli.formatting import Moment, Plain
from amphora_driver.database.tables import work
from amphora_driver.errors import RequestError, UnknownObject
from amphora_driver.queue import local_socket
from amphora_driver.store import resyncs

HEAD = ("Load balancer", "Asked", "Asked by", "Ended", "Outcome", "Detail")
# Seconds between two looks whether it is done.
_POLL_SECONDS = 0.2
_PENDING = "not done yet"


class ResyncLoadBalancer(Lister):
    """Read load balancers from Octavia as a whole, want what it has, and tell it every status again.

    Without ID and --all: what came of those asked for before. An id that is not recorded here is given in full.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", nargs="*", metavar="ID", help="Ids, or beginnings of ids.")
        parser.add_argument("--all", action="store_true", help="Every load balancer that is recorded.")
        parser.add_argument(
            "--remove-unknown", action="store_true", help="Remove those that only one side knows, there."
        )
        parser.add_argument(
            "--wait", type=float, default=0.0, metavar="SECONDS", help="How long to wait for the end (default: 0)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        words, everything = parsed_args.load_balancer, parsed_args.all
        if words and everything:
            raise RequestError("resynchronise", "ids are named, and --all", "Say one of both.")
        chosen = None
        if words or everything:
            chosen = self.app.read(lambda connection: _all(connection) if everything else _named(connection, words))
            self._ask(chosen, remove_unknown=parsed_args.remove_unknown)
        deadline = time.monotonic() + parsed_args.wait
        while True:
            rows = self.app.read(lambda connection: resyncs.list_resyncs(connection, chosen))
            if all(row.ended_at for row in rows) or time.monotonic() >= deadline:
                return HEAD, map(_shown, rows)
            time.sleep(_POLL_SECONDS)

    def _ask(self, chosen: list[str], *, remove_unknown: bool) -> None:
        database = self.app.database
        now, by = database.now(), who_where()
        database.write(
            lambda connection: resyncs.request_resyncs(connection, chosen, now, by, remove_unknown=remove_unknown)
        )
        local_socket.wake_role(self.app.conf.queue.doorbell_dir, local_socket.REPORTER)


def _all(connection: sa.Connection) -> list[str]:
    query = sa.select(work.c.load_balancer_id).where(id_prefix.IS_LOAD_BALANCER)
    return list(connection.execute(query.order_by(work.c.load_balancer_id)).scalars())


def _named(connection: sa.Connection, words: list[str]) -> list[str]:
    return sorted({_one(connection, word) for word in words})


def _one(connection: sa.Connection, word: str) -> str:
    try:
        return id_prefix.load_balancer(connection, word)
    except UnknownObject:
        # Perhaps Octavia knows it: then it is a whole id.
        try:
            whole = str(uuid.UUID(word))
        except ValueError:
            whole = ""
        if whole != word:
            raise
        return word


def _shown(row: Any) -> tuple[Any, ...]:
    times = (Moment(row.asked_at), Plain(row.asked_by), Moment(row.ended_at))
    return (row.load_balancer_id, *times, row.outcome or _PENDING, Plain(row.detail))
