# SPDX-License-Identifier: Apache-2.0
"""Differences of two lists of members, for the request of a change to the L4 daemon. Pure.

An edit is a list of JSON: the position in the former list, the number of removed members, and the added members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from amphora_agent.l4 import model
from amphora_agent.l4.model import Member, VirtualServer


def change_document(before: Sequence[VirtualServer], after: Sequence[VirtualServer]) -> list[dict[str, Any]]:
    """Return the list that `apply_change` reads."""
    known = {server.id: server.members for server in before}
    return [
        {**model.head_document(one), "edits": _edits(known.get(one.id, ()), one.members), "count": len(one.members)}
        for one in after
    ]


def apply_change(before: Sequence[VirtualServer], value: Any) -> tuple[VirtualServer, ...]:
    """Return the servers of a document of `change_document`; raises ValueError, KeyError or TypeError."""
    known = {server.id: server.members for server in before}
    heads = model.parse(
        [{**{key: one[key] for key in one if key not in ("edits", "count")}, "members": []} for one in value]
    )
    found = []
    for head, document in zip(heads, value, strict=True):
        members = _edited(known.get(head.id, ()), document["edits"])
        model.refuse_repeated(members, f"virtual server {head.id}:")
        if len(members) != document["count"]:
            raise ValueError(f"virtual server {head.id}: the edits do not belong to the present members")
        found.append(replace(head, members=members))
    return tuple(found)


def _edits(before: Sequence[Member], after: Sequence[Member]) -> list[list[Any]]:
    if before is after:
        return []
    old, new = ({one.id for one in each} for each in (before, after))
    found: list[list[Any]] = []
    i, j = 0, 0
    while i < len(before) or j < len(after):
        former = before[i] if i < len(before) else None
        latter = after[j] if j < len(after) else None
        if former is latter or former == latter:
            i, j = i + 1, j + 1
            continue
        removed, added = _step(former, latter, old, new)
        if not removed and not added:
            # The members are in another order, so one edit replaces the rest.
            removed, added = len(before) - i, len(after) - j
        _append(found, i, removed, after[j : j + added])
        i, j = i + removed, j + added
    return found


def _step(former: Member | None, latter: Member | None, old: set[str], new: set[str]) -> tuple[int, int]:
    """Return the number of removed and of added members at this position; zeros if both are elsewhere."""
    same = former is not None and latter is not None and former.id == latter.id
    removed = former is not None and (same or former.id not in new)
    added = latter is not None and (same or latter.id not in old)
    return int(removed), int(added)


def _append(found: list[list[Any]], at: int, removed: int, added: Sequence[Member]) -> None:
    documents = [model.member_document(one) for one in added]
    if found and found[-1][0] + found[-1][1] == at:
        found[-1][1] += removed
        found[-1][2] += documents
    else:
        found.append([at, removed, documents])


def _edited(before: Sequence[Member], value: Any) -> tuple[Member, ...]:
    known: Mapping[str, Member] = {}
    found: list[Member] = []
    at = 0
    for start, removed, added in value:
        if not at <= start <= start + removed <= len(before):
            raise ValueError("an edit is outside of the members")
        found += before[at:start]
        found += model.parse_members(added, known, "a change:")
        at = start + removed
    return (*found, *before[at:])
