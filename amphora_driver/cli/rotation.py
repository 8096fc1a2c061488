# SPDX-License-Identifier: Apache-2.0
"""Commands about image rotations, which replace the amphorae of many load balancers, a few at a time.

Invariant: the commands read and write rows only, so they work while no other process of the control plane runs. A
controller performs the rotation as soon as one runs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import sqlalchemy as sa

from amphora_driver.cli import queries
from amphora_driver.cli.command import Command, Lister, ShowOne, Table, argument, operator_at_host
from amphora_driver.cli.formatting import Counts, Duration, Remaining, Timestamp, Value
from amphora_driver.errors import Conflict
from amphora_driver.plugins import Catalogue
from amphora_driver.store import rotations
from amphora_driver.store.rotations import ItemState, Rotation, RotationItem, RotationState, Selection

_HEAD = ("ID", "State", "Done", "Load balancers", "Asked by", "Begun", "Ended", "Reason")
_ITEM_HEAD = ("Place", "Load balancer", "State", "Begun", "Seconds", "Amphorae", "Reason")
_ID = argument("rotation", type=int, metavar="ID", help="Number of the rotation.")
_OPTIONAL_ID = argument(
    "rotation", type=int, metavar="ID", nargs="?", help="Number of the rotation (default: the newest rotation)."
)
_MAX_HELP = "Largest number of load balancers whose amphorae are replaced at the same time (default: 1)."


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


class Rotate(ShowOne):
    """Replace amphorae of many load balancers. Each one must be served before the next one begins."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        which = parser.add_mutually_exclusive_group(required=True).add_argument
        which("--all", action="store_true", help="All amphorae.")
        which("--image", metavar="NAME", help="Amphorae that were not booted from this image.")
        which("--older-than", type=_seconds, metavar="SECONDS", help="Amphorae that were booted longer ago.")
        which("--host", metavar="NAME", help="Amphorae on this hypervisor, before its maintenance.")
        which("--zone", metavar="NAME", help="Amphorae in this availability zone, before its maintenance.")
        which("--left-of", type=int, metavar="ID", help="Amphorae that the rotation with this id did not replace.")
        add = parser.add_argument
        add("--max-unavailable", type=_positive, default=1, metavar="N", help=_MAX_HELP)
        words = "Only amphorae of this load balancer; can be repeated; the order is kept."
        add("--loadbalancer", action="append", default=[], metavar="ID", help=words)
        add("--compute-flavor", metavar="NAME", help="Only load balancers with this compute flavor.")
        add("--project", metavar="ID", help="Only load balancers of this project.")
        add("--topology", metavar="NAME", help="Only load balancers of this topology.")
        add("--dry-run", action="store_true", help="Print the number of amphorae to replace, and do nothing.")
        return parser

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        hosts, located = self._locate(parsed_args.host, parsed_args.zone)

        def count(connection: sa.Connection) -> dict[str, Any]:
            wanted = _selection(connection, parsed_args, hosts)
            found = rotations.select_amphorae(connection, wanted, time.time(), located)
            return {"Load balancers": len(found), "Amphorae": sum(map(len, found.values()))}

        def write(connection: sa.Connection) -> dict[str, Any]:
            selection, most = _selection(connection, parsed_args, hosts), parsed_args.max_unavailable
            requested = rotations.request_rotation(connection, selection, most, operator_at_host(), located)
            return _details(connection, requested)

        shown: dict[str, Any] = self.app.read(count) if parsed_args.dry_run else self.app.database.write(write)
        return shown

    def _locate(self, host: str | None, zone: str | None) -> tuple[tuple[str, ...], frozenset[str] | None]:
        """Return the hypervisor's names and the amphorae at a location; None without a location.

        The compute backends are asked, because a machine may have moved since its boot.
        """
        if host is None and zone is None:
            return (), None
        hosts: set[str] = set()
        found: set[str] = set()
        for compute in Catalogue(self.app.conf, self.app.database).computes().values():
            names = frozenset() if host is None else compute.host_names(host)
            hosts |= names
            found |= {
                amphora_id
                for amphora_id, location in compute.locations().items()
                if location.host in names or (zone is not None and location.zone == zone)
            }
        return tuple(sorted(hosts)), frozenset(found)


class ListRotations(Lister):
    """List rotations, newest first."""

    arguments = (
        argument(
            "--limit", type=_positive, default=20, metavar="NUMBER", help="Largest number of lines (default: 20)."
        ),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        def read(connection: sa.Connection) -> list[tuple[Any, ...]]:
            newest = rotations.list_newest_rotations(connection, parsed_args.limit)
            return [_list_row(one, rotations.count_items(connection, one.id)) for one in newest]

        return _HEAD, self.app.read(read)


class ShowRotation(ShowOne):
    """Show the progress of one rotation: current load balancers, reason for a pause, expected end."""

    arguments = (_OPTIONAL_ID,)

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        shown: dict[str, Any] = self.app.read(
            lambda connection: _details(connection, _find_rotation(connection, parsed_args.rotation))
        )
        return shown


class ListItems(Lister):
    """List the load balancers of a rotation in their order, with state and duration."""

    arguments = (
        _OPTIONAL_ID,
        argument(
            "--state",
            choices=[one.value for one in ItemState],
            action="append",
            help="Only load balancers in this state; can be repeated.",
        ),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        states = None if parsed_args.state is None else [ItemState(one) for one in parsed_args.state]

        def read(connection: sa.Connection) -> list[RotationItem]:
            return rotations.list_items(connection, _find_rotation(connection, parsed_args.rotation).id, states)

        return _ITEM_HEAD, map(_item_row, self.app.read(read))


class PauseRotation(Command):
    """Pause a rotation: it begins no other load balancer, and finishes those in progress."""

    arguments = (_ID,)

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        reason = f"paused by {operator_at_host()}"
        self.app.database.write(lambda c: rotations.pause_rotation(c, parsed_args.rotation, reason))


class ResumeRotation(Command):
    """Resume a paused rotation. Load balancers that failed are tried again."""

    arguments = (
        _ID,
        argument("--leave-failed", action="store_true", help="Continue without the load balancers that failed."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        leave = parsed_args.leave_failed
        self.app.database.write(lambda c: rotations.resume_rotation(c, parsed_args.rotation, leave_failed=leave))


class AbortRotation(Command):
    """End a rotation: it begins no other load balancer, and finishes those in progress."""

    arguments = (_ID,)

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        self.app.database.write(lambda c: rotations.abort_rotation(c, parsed_args.rotation))


def _find_rotation(connection: sa.Connection, rotation_id: int | None) -> Rotation:
    if rotation_id is not None:
        return rotations.get_rotation(connection, rotation_id)
    found = rotations.list_newest_rotations(connection, 1)
    if not found:
        raise Conflict("show the newest rotation", "no rotation is recorded", "Begin one: amphoractl rotate.")
    return found[0]


def _selection(connection: sa.Connection, parsed_args: argparse.Namespace, hosts: tuple[str, ...]) -> Selection:
    return Selection(
        image=parsed_args.image,
        older_than=parsed_args.older_than,
        everything=parsed_args.all,
        left_of=parsed_args.left_of,
        load_balancers=tuple(queries.find_load_balancer_id(connection, one) for one in parsed_args.loadbalancer),
        compute_flavor=parsed_args.compute_flavor,
        project=parsed_args.project,
        topology=parsed_args.topology,
        host=parsed_args.host,
        hosts=hosts,
        zone=parsed_args.zone,
    )


def _details(connection: sa.Connection, found: Rotation) -> dict[str, Any]:
    every = rotations.list_items(connection, found.id)
    running = [one.load_balancer_id for one in every if one.state is ItemState.RUNNING]
    took = [seconds for one in every if one.state is ItemState.DONE and (seconds := _seconds_of(one)) is not None]
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
        "Seconds each": Duration(sum(took) / len(took) if took else None),
    }


def _arguments(wanted: Selection) -> str:
    """Return the selection as arguments of `rotate`."""
    options = {
        "image": wanted.image,
        "older-than": None if wanted.older_than is None else f"{wanted.older_than:g}",
        "left-of": wanted.left_of,
        "host": wanted.host,
        "zone": wanted.zone,
    }
    limits = {"compute-flavor": wanted.compute_flavor, "project": wanted.project, "topology": wanted.topology}
    words = ["--all"] if wanted.everything else []
    words += [f"--{name} {value}" for name, value in options.items() if value is not None]
    words += [f"--loadbalancer {one}" for one in wanted.load_balancers]
    return " ".join([*words, *(f"--{name} {value}" for name, value in limits.items() if value is not None)])


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
