# SPDX-License-Identifier: Apache-2.0
"""Commands about rotations: replacing the amphorae of many load balancers, a few at a time.

Invariant: all of them read and write rows only, so that they work while no other process of ours is alive. What was
asked for is done by whichever controller lives, now or later.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from cliff.command import Command
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.cli import id_prefix
from amphora_driver.cli.failover_request import who_where
from amphora_driver.cli.formatting import Counts, Left, Moment, Plain, Span
from amphora_driver.errors import Conflict
from amphora_driver.store import rotations
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState, Selection

_HEAD = ("ID", "State", "Done", "Load balancers", "Asked by", "Begun", "Ended", "Reason")
_ITEM_HEAD = ("Place", "Load balancer", "State", "Begun", "Seconds", "Amphorae", "Reason")


class Rotate(ShowOne):
    """Replace amphorae of many load balancers, a few at a time, each proven to serve before the next one's turn."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--all", action="store_true", help="All amphorae.")
        which.add_argument("--image", metavar="NAME", help="Those that were not booted from this image.")
        which.add_argument("--older-than", type=_seconds, metavar="SECONDS", help="Those booted longer ago than that.")
        which.add_argument("--left-of", type=int, metavar="ID", help="Those that this rotation did not replace.")
        parser.add_argument(
            "--max-unavailable",
            type=_number,
            default=1,
            metavar="N",
            help="Of how many load balancers at once amphorae may be replaced (default: 1).",
        )
        parser.add_argument(
            "--loadbalancer",
            action="append",
            default=[],
            metavar="ID",
            help="Only this load balancer's; may be repeated, and they are taken in this order.",
        )
        parser.add_argument("--compute-flavor", metavar="NAME", help="Only of load balancers with such machines.")
        parser.add_argument("--project", metavar="ID", help="Only of this project's load balancers.")
        parser.add_argument("--topology", metavar="NAME", help="Only of load balancers of this topology.")
        parser.add_argument("--dry-run", action="store_true", help="Say what would be replaced, and do nothing.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        if parsed_args.dry_run:
            found: dict[str, tuple[str, ...]] = self.app.read(
                lambda connection: rotations.select_amphorae(
                    connection, _selection(connection, parsed_args), time.time()
                )
            )
            return ("Load balancers", "Amphorae"), (len(found), sum(map(len, found.values())))

        def write(connection: sa.Connection) -> dict[str, Any]:
            wanted = _selection(connection, parsed_args)
            asked = rotations.request_rotation(connection, wanted, parsed_args.max_unavailable, who_where())
            return _shown(connection, asked)

        shown = self.app.database.write(write)
        return tuple(shown), tuple(shown.values())


class ListRotations(Lister):
    """Rotations, the newest first."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--limit", type=_number, default=20, metavar="NUMBER", help="How many (default: 20).")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        rows = self.app.read(
            lambda connection: [
                (one, rotations.count_items(connection, one.id))
                for one in rotations.list_newest_rotations(connection, parsed_args.limit)
            ]
        )
        return _HEAD, (_listed(one, counts) for one, counts in rows)


class ShowRotation(ShowOne):
    """One rotation: how far it is, whose turn it is, what it waits for and how long it will take."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        return _with_id(super().get_parser(prog_name), optional=True)

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        shown = self.app.read(lambda connection: _shown(connection, _meant(connection, parsed_args.rotation)))
        return tuple(shown), tuple(shown.values())


class ListItems(Lister):
    """The load balancers of a rotation, in their order: what became of each, and how long it took."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser = _with_id(super().get_parser(prog_name), optional=True)
        states = [one.value for one in ItemState]
        parser.add_argument("--state", choices=states, action="append", help="Only those; may be repeated.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        states = None if parsed_args.state is None else [ItemState(one) for one in parsed_args.state]
        found = self.app.read(
            lambda connection: rotations.list_items(connection, _meant(connection, parsed_args.rotation).id, states)
        )
        return _ITEM_HEAD, map(_item, found)


class PauseRotation(Command):
    """Have a rotation begin nothing new; what it has begun is finished."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        return _with_id(super().get_parser(prog_name))

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        reason = f"{who_where()} paused it"
        self.app.database.write(
            _on(parsed_args, lambda c, rotation_id: rotations.pause_rotation(c, rotation_id, reason))
        )


class ResumeRotation(Command):
    """Have a paused rotation go on; load balancers that failed are watched again."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser = _with_id(super().get_parser(prog_name))
        parser.add_argument("--leave-failed", action="store_true", help="Go on without those that failed.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        leave = parsed_args.leave_failed
        self.app.database.write(
            _on(parsed_args, lambda c, rotation_id: rotations.resume_rotation(c, rotation_id, leave_failed=leave))
        )


class AbortRotation(Command):
    """Have a rotation begin nothing any more, for good; what it has begun is finished."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        return _with_id(super().get_parser(prog_name))

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down."""
        self.app.database.write(_on(parsed_args, rotations.abort_rotation))


def _on(
    parsed_args: argparse.Namespace, change: Callable[[sa.Connection, int], None]
) -> Callable[[sa.Connection], None]:
    return lambda connection: change(connection, parsed_args.rotation)


def _with_id(parser: argparse.ArgumentParser, *, optional: bool = False) -> argparse.ArgumentParser:
    words = "Number of the rotation" + (" (default: the newest one)." if optional else ".")
    parser.add_argument("rotation", type=int, metavar="ID", nargs="?" if optional else None, help=words)
    return parser


def _meant(connection: sa.Connection, rotation_id: int | None) -> Rotation:
    if rotation_id is not None:
        return rotations.get_rotation(connection, rotation_id)
    found = rotations.list_newest_rotations(connection, 1)
    if not found:
        raise Conflict("show the newest rotation", "there has been none")
    return found[0]


def _selection(connection: sa.Connection, parsed_args: argparse.Namespace) -> Selection:
    return Selection(
        image=parsed_args.image,
        older_than=parsed_args.older_than,
        everything=parsed_args.all,
        left_of=parsed_args.left_of,
        load_balancers=tuple(id_prefix.load_balancer(connection, one) for one in parsed_args.loadbalancer),
        compute_flavor=parsed_args.compute_flavor,
        project=parsed_args.project,
        topology=parsed_args.topology,
    )


def _shown(connection: sa.Connection, found: Rotation) -> dict[str, Any]:
    every = rotations.list_items(connection, found.id)
    running = [one.load_balancer_id for one in every if one.state is ItemState.RUNNING]
    left = rotations.estimate_remaining_seconds(every, found.max_unavailable) if found.ended_at is None else None
    paused = found.state is RotationState.PAUSED
    return {
        "ID": found.id,
        "State": found.state.value,
        "Reason": Plain(found.reason),
        "Wanted": _words(found.wanted),
        "Max unavailable": found.max_unavailable,
        "Asked by": found.asked_by,
        "Asked at": Moment(found.created_at),
        "Ended at": Moment(found.ended_at),
        "Load balancers": Counts(rotations.count_items(connection, found.id)),
        "Current": "\n".join(running),
        "Expected to end in": Left(None if left is None or paused else time.time() + left),
        "Seconds each": Span(_mean(every)),
    }


def _words(wanted: Selection) -> str:
    """What was asked for, as it was asked for."""
    words = [
        "--all" if wanted.everything else "",
        f"--image {wanted.image}" if wanted.image is not None else "",
        f"--older-than {wanted.older_than:g}" if wanted.older_than is not None else "",
        f"--left-of {wanted.left_of}" if wanted.left_of is not None else "",
        *(f"--loadbalancer {one}" for one in wanted.load_balancers),
        f"--compute-flavor {wanted.compute_flavor}" if wanted.compute_flavor is not None else "",
        f"--project {wanted.project}" if wanted.project is not None else "",
        f"--topology {wanted.topology}" if wanted.topology is not None else "",
    ]
    return " ".join(word for word in words if word)


def _mean(every: list[RotationItem]) -> float | None:
    took = [seconds for one in every if one.state is ItemState.DONE and (seconds := _took(one)) is not None]
    return sum(took) / len(took) if took else None


def _took(item: RotationItem) -> float | None:
    if item.begun_at is None:
        return None
    return (time.time() if item.ended_at is None else item.ended_at) - item.begun_at


def _listed(one: Rotation, counts: dict[str, int]) -> tuple[Any, ...]:
    numbers = (counts.get(ItemState.DONE.value, 0), sum(counts.values()))
    return (
        *(one.id, one.state.value, *numbers),
        *(one.asked_by, Moment(one.created_at), Moment(one.ended_at), Plain(one.reason)),
    )


def _item(one: RotationItem) -> tuple[Any, ...]:
    return (
        *(one.place, one.load_balancer_id, one.state.value),
        *(Moment(one.begun_at), Span(_took(one)), len(one.amphorae), Plain(one.reason)),
    )


def _number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("a number of seconds")
    return seconds
