# SPDX-License-Identifier: Apache-2.0
"""Changes that Octavia makes to L7 policies without a call to the provider.

Invariant: pure functions. The positions of a listener's policies are 1, 2, 3 without a gap. An inserted, moved or
deleted policy shifts the others, and Octavia makes no call for these. Octavia clears redirect attributes that the
action does not use. A position beyond the end, such as Octavia's default 2147483647, means the end.
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
    """Return the policies of one listener in order, with positions from 1."""
    ordered = sorted(policies, key=lambda one: (one.position, one.id))
    return tuple(_with_position(one, number) for number, one in enumerate(ordered, start=1))


def insert_at_position(policies: Iterable[L7Policy], policy: L7Policy) -> tuple[L7Policy, ...]:
    """Return the policies of a listener after an insert or move of this one to its position."""
    others = [one for one in renumber(policies) if one.id != policy.id]
    others.insert(max(policy.position, 1) - 1, policy)
    return tuple(_with_position(one, number) for number, one in enumerate(others, start=1))


def clear_unused_redirects(policy: L7Policy) -> L7Policy:
    """Return the policy without the redirect attributes that its action does not use."""
    unused = {name: None for name in _UNUSED_REDIRECTS[policy.action] if getattr(policy, name) is not None}
    return msgspec.structs.replace(policy, **unused) if unused else policy


def _with_position(policy: L7Policy, position: int) -> L7Policy:
    return policy if policy.position == position else msgspec.structs.replace(policy, position=position)
