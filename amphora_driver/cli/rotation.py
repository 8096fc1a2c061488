# SPDX-License-Identifier: Apache-2.0
"""Commands about image rotations, which replace the amphorae of many load balancers, a few at a time.

Invariant: the commands read and write rows only, so they work while no other process of the control plane runs. A
controller performs the rotation as soon as one runs.
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

from amphora_driver.cli import queries
from amphora_driver.cli.formatting import Counts, Duration, Remaining, Timestamp, Value
from amphora_driver.cli.operator_name import operator_at_host
from amphora_driver.errors import Conflict
from amphora_driver.store import rotations
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState, Selection

_HEAD = ("ID", "State", "Done", "Load balancers", "Asked by", "Begun", "Ended", "Reason")
_ITEM_HEAD = ("Place", "Load balancer", "State", "Begun", "Seconds", "Amphorae", "Reason")


class Rotate(ShowOne):
    """Replace amphorae of many load balancers. Each one must be served before the next one begins."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--all", action="store_true", help="All amphorae.")
        which.add_argument("--image", metavar="NAME", help="Amphorae that were not booted from this image.")
        which.add_argument(
            "--older-than", type=_seconds, metavar="SECONDS", help="Amphorae that were booted longer ago."
        )
        which.add_argument(
            "--left-of", type=int, metavar="ID", help="Amphorae that the rotation with this id did not replace."
        )
        parser.add_argument(
            "--max-unavailable",
            type=_positive,
            default=1,
            metavar="N",
            help="Largest number of load balancers whose amphorae are replaced at the same time (default: 1).",
        )
        parser.add_argument(
            "--loadbalancer",
            action="append",
            default=[],
            metavar="ID",
            help="Only amphorae of this load balancer; can be repeated; the order is kept.",
        )
        parser.add_argument("--compute-flavor", metavar="NAME", help="Only load balancers with this compute flavor.")
        parser.add_argument("--project", metavar="ID", help="Only load balancers of this project.")
        parser.add_argument("--topology", metavar="NAME", help="Only load balancers of this topology.")
        parser.add_argument(
            "--dry-run", action="store_true", help="Print the number of amphorae to replace, and do nothing."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values."""
        if parsed_args.dry_run:
            found: dict[str, tuple[str, ...]] = self.app.read(
                lambda connection: rotations.select_amphorae(
                    connection, _selection(connection, parsed_args), time.time()
                )
            )
            return ("Load balancers", "Amphorae"), (len(found), sum(map(len, found.values())))

        def write(connection: sa.Connection) -> dict[str, Any]:
            selection = _selection(connection, parsed_args)
            requested = rotations.request_rotation(
                connection, selection, parsed_args.max_unavailable, operator_at_host()
            )
            return _details(connection, requested)

        shown = self.app.database.write(write)
        return tuple(shown), tuple(shown.values())


class ListRotations(Lister):
    """List rotations, newest first."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument(
            "--limit", type=_positive, default=20, metavar="NUMBER", help="Largest number of lines (default: 20)."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Return column names and rows."""
        rows = self.app.read(
            lambda connection: [
                (one, rotations.count_items(connection, one.id))
                for one in rotations.list_newest_rotations(connection, parsed_args.limit)
            ]
        )
        return _HEAD, (_list_row(one, counts) for one, counts in rows)


class ShowRotation(ShowOne):
    """Show the progress of one rotation: current load balancers, reason for a pause, expected end."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        return _with_id(super().get_parser(prog_name), optional=True)

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Return names and values."""
        shown = self.app.read(lambda connection: _details(connection, _find_rotation(connection, parsed_args.rotation)))
        return tuple(shown), tuple(shown.values())


class ListItems(Lister):
    """List the load balancers of a rotation in their order, with state and duration."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser = _with_id(super().get_parser(prog_name), optional=True)
        states = [one.value for one in ItemState]
        parser.add_argument(
            "--state", choices=states, action="append", help="Only load balancers in this state; can be repeated."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Return column names and rows."""
        states = None if parsed_args.state is None else [ItemState(one) for one in parsed_args.state]
        found = self.app.read(
            lambda connection: rotations.list_items(
                connection, _find_rotation(connection, parsed_args.rotation).id, states
            )
        )
        return _ITEM_HEAD, map(_item_row, found)


class PauseRotation(Command):
    """Pause a rotation: it begins no other load balancer; those in progress are finished."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        return _with_id(super().get_parser(prog_name))

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write the row."""
        reason = f"paused by {operator_at_host()}"
        self.app.database.write(
            _apply(parsed_args, lambda c, rotation_id: rotations.pause_rotation(c, rotation_id, reason))
        )


class ResumeRotation(Command):
    """Resume a paused rotation. Load balancers that failed are tried again."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        parser = _with_id(super().get_parser(prog_name))
        parser.add_argument(
            "--leave-failed", action="store_true", help="Continue without the load balancers that failed."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write the row."""
        leave = parsed_args.leave_failed
        self.app.database.write(
            _apply(parsed_args, lambda c, rotation_id: rotations.resume_rotation(c, rotation_id, leave_failed=leave))
        )


class AbortRotation(Command):
    """End a rotation: it begins no other load balancer; those in progress are finished."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Add the arguments."""
        return _with_id(super().get_parser(prog_name))

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write the row."""
        self.app.database.write(_apply(parsed_args, rotations.abort_rotation))


def _apply(
    parsed_args: argparse.Namespace, change: Callable[[sa.Connection, int], None]
) -> Callable[[sa.Connection], None]:
    return lambda connection: change(connection, parsed_args.rotation)


def _with_id(parser: argparse.ArgumentParser, *, optional: bool = False) -> argparse.ArgumentParser:
    words = "Number of the rotation" + (" (default: the newest rotation)." if optional else ".")
    parser.add_argument("rotation", type=int, metavar="ID", nargs="?" if optional else None, help=words)
    return parser


def _find_rotation(connection: sa.Connection, rotation_id: int | None) -> Rotation:
    if rotation_id is not None:
        return rotations.get_rotation(connection, rotation_id)
    found = rotations.list_newest_rotations(connection, 1)
    if not found:
        raise Conflict("show the newest rotation", "no rotation is recorded", "Begin one: amphoractl rotate.")
    return found[0]


def _selection(connection: sa.Connection, parsed_args: argparse.Namespace) -> Selection:
    return Selection(
        image=parsed_args.image,
        older_than=parsed_args.older_than,
        everything=parsed_args.all,
        left_of=parsed_args.left_of,
        load_balancers=tuple(queries.find_load_balancer_id(connection, one) for one in parsed_args.loadbalancer),
        compute_flavor=parsed_args.compute_flavor,
        project=parsed_args.project,
        topology=parsed_args.topology,
    )


def _details(connection: sa.Connection, found: Rotation) -> dict[str, Any]:
    every = rotations.list_items(connection, found.id)
    running = [one.load_balancer_id for one in every if one.state is ItemState.RUNNING]
    left = rotations.estimate_remaining_seconds(every, found.max_unavailable) if found.ended_at is None else None
    paused = found.state is RotationState.PAUSED
    return {
        "ID": found.id,
        "State": found.state.value,
        "Reason": Value(found.reason),
        "Wanted": _arguments(found.wanted),
        "Max unavailable": found.max_unavailable,
        "Asked by": found.asked_by,
        "Asked at": Timestamp(found.created_at),
        "Ended at": Timestamp(found.ended_at),
        "Load balancers": Counts(rotations.count_items(connection, found.id)),
        "Current": "\n".join(running),
        "Expected to end in": Remaining(None if left is None or paused else time.time() + left),
        "Seconds each": Duration(_mean_seconds(every)),
    }


def _arguments(wanted: Selection) -> str:
    """Return the selection as arguments of `rotate`."""
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


def _mean_seconds(every: list[RotationItem]) -> float | None:
    took = [seconds for one in every if one.state is ItemState.DONE and (seconds := _seconds_of(one)) is not None]
    return sum(took) / len(took) if took else None


def _seconds_of(item: RotationItem) -> float | None:
    if item.begun_at is None:
        return None
    return (time.time() if item.ended_at is None else item.ended_at) - item.begun_at


def _list_row(one: Rotation, counts: dict[str, int]) -> tuple[Any, ...]:
    numbers = (counts.get(ItemState.DONE.value, 0), sum(counts.values()))
    return (
        *(one.id, one.state.value, *numbers),
        *(one.asked_by, Timestamp(one.created_at), Timestamp(one.ended_at), Value(one.reason)),
    )


def _item_row(one: RotationItem) -> tuple[Any, ...]:
    return (
        *(one.place, one.load_balancer_id, one.state.value),
        *(Timestamp(one.begun_at), Duration(_seconds_of(one)), len(one.amphorae), Value(one.reason)),
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return seconds
