# SPDX-License-Identifier: Apache-2.0
"""What Octavia does to L7 policies without telling anybody.

Invariant: pure. The policies of a listener are counted from 1 without a gap; whoever is put in, moved or taken out
shifts the others, and Octavia makes no call for those. Redirect attributes that an action has no use for are emptied.
Positions beyond the end, 2147483647 above all ("wherever"), mean the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from amphora_driver.model.enums import L7Action
from amphora_driver.model.loadbalancer import L7Policy

_UNUSED_REDIRECTS: dict[L7Action, tuple[str, ...]] = {
    L7Action.REJECT: ("redirect_pool_id", "redirect_url", "redirect_prefix", "redirect_http_code"),
    L7Action.REDIRECT_TO_POOL: ("redirect_url", "redirect_prefix", "redirect_http_code"),
    L7Action.REDIRECT_TO_URL: ("redirect_pool_id", "redirect_prefix"),
    L7Action.REDIRECT_PREFIX: ("redirect_pool_id", "redirect_url"),
}


def renumber(policies: Iterable[L7Policy]) -> tuple[L7Policy, ...]:
    """These policies of one listener in their order, counted from 1."""
    ordered = sorted(policies, key=lambda one: (one.position, one.id))
    return tuple(_with_position(one, number) for number, one in enumerate(ordered, start=1))


def insert_at_position(policies: Iterable[L7Policy], policy: L7Policy) -> tuple[L7Policy, ...]:
    """The policies of a listener once this one, which may be one of them, stands where it says."""
    others = [one for one in renumber(policies) if one.id != policy.id]
    others.insert(max(policy.position, 1) - 1, policy)
    return tuple(_with_position(one, number) for number, one in enumerate(others, start=1))


def clear_unused_redirects(policy: L7Policy) -> L7Policy:
    """The policy without what its action does not use."""
    left = {name: None for name in _UNUSED_REDIRECTS[policy.action] if getattr(policy, name) is not None}
    return msgspec.structs.replace(policy, **left) if left else policy


def _with_position(policy: L7Policy, position: int) -> L7Policy:
    return policy if policy.position == position else msgspec.structs.replace(policy, position=position)
