# SPDX-License-Identifier: Apache-2.0
"""The outcome of a value: a refusal by name, or exactly one value in the configuration."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from fields import CHECKS, Field
from reading import counted
from trees import change

from amphora_driver.errors import AmphoraDriverError, UnsupportedOption
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.render.haproxy import Rendered, render


@lru_cache
def base(field: Field) -> Counter:
    """Return the directives with a harmless value."""
    rendered = render(field.make(0, field.harmless(0)))
    assert not rendered.refused, rendered.refused
    return counted(rendered.text)


class Unexpected(AssertionError):
    """The directives differ from the harmless value's directives in more than the accepted value."""

    def __init__(self, value: str, found: Counter, wanted: Counter) -> None:
        super().__init__(f"{value!r} reads as {list(found - wanted)}")
        self.found = found


def judge(field: Field, value: str, reads: str | None = None) -> tuple[str, Rendered]:
    """Return the outcome of a value, as in `corpus`.

    Args:
        field: the tested field.
        value: its value.
        reads: the expected value in the configuration, if not the field's own.

    Raises:
        AssertionError: the value is neither refused as expected nor exactly one value in its place.
    """
    tree = field.make(0, value)
    rendered = render(tree)
    refusal = objection(field, tree, value)
    if rendered.refused:
        fault = field.at_fault(0, value)
        named = [error for error in rendered.refused if error.object_id == fault]
        assert named, f"{fault} is not among {rendered.refused}"
        if field.option:
            assert refusal, "the driver accepts a value that the renderer refuses"
            assert any(field.option in str(error) for error in named), f"{named} do not name {field.option}"
            for error in rendered.refused:
                shown(error)
        left = counted(rendered.text)
        if field.alone:
            assert left == counted(render(without(tree, fault)).text), "a refused value changes other directives"
            assert any(head == ("frontend", "k0") for head, _ in left), "the neighbour is not served"
        else:
            assert not left
        return "refused", rendered
    assert refusal is None, f"the driver refuses a value that the renderer accepts: {refusal}"
    found = counted(rendered.text)
    if found == base(field) and value != field.harmless(0):
        return "nothing", rendered
    try:
        written = field.written(value) if reads is None else reads
    except ValueError:
        written = None
    if written is not None and found == placing(field, written):
        return "as written" if reads is None else "reads", rendered
    if not value and found == counted(render(field.make(0, None)).text):
        return "absent", rendered
    raise Unexpected(value, found, base(field))


def placing(field: Field, value: str | tuple[str, ...]) -> Counter:
    """Return the directives with this value in place of the harmless one, and no other difference."""
    good = field.written(field.harmless(0))
    good, values = (good,) if isinstance(good, str) else good, (value,) if isinstance(value, str) else value

    def swapped(words: tuple[str, ...]) -> tuple[str, ...]:
        found: list[str] = []
        for word in words:
            found += values if (word,) == good else (word.replace(good[0], values[0]),)
        return tuple(found)

    swap: Counter = Counter()
    for (head, line), times in base(field).items():
        swap[swapped(head), swapped(line)] += times
    return swap


def objection(field: Field, tree: LoadBalancer, value: str) -> UnsupportedOption | None:
    """Return the refusal of the driver, or None."""
    kind = field.owner
    if not kind:
        return None
    said: list[UnsupportedOption] = []
    try:
        CHECKS[kind](node(tree, field.at_fault(0, value)))
    except UnsupportedOption as error:
        said.append(error)
    for error in said:
        assert field.option is None or field.option in str(error), f"{error} does not name {field.option}"
        shown(error)
        return error
    return None


def shown(error: AmphoraDriverError) -> None:
    """Assert that the text of an error is one short line, because logs and API answers contain it."""
    said = str(error)
    assert said.isprintable(), repr(said)
    assert len(said) < 1000, "the whole value is in the message"


def node(tree: LoadBalancer, object_id: str) -> object:
    """Return the object of a tree with this id."""
    for each in nodes(tree):
        if each.id == object_id:
            return each
    raise AssertionError(object_id)


def nodes(tree: LoadBalancer):
    yield tree
    for listener in tree.listeners:
        yield listener
        for policy in listener.l7policies:
            yield policy
            yield from policy.rules
    for pool in tree.pools:
        yield pool
        yield from pool.members
        if pool.healthmonitor:
            yield pool.healthmonitor


def without(tree: LoadBalancer, object_id: str) -> LoadBalancer:
    """Return the load balancer without the parts that depend on this object.

    A refused policy or rule also removes its listener, because it may restrict access.
    """
    listeners = tuple(
        listener
        for listener in tree.listeners
        if object_id != listener.id
        and not any(object_id in (policy.id, *(rule.id for rule in policy.rules)) for policy in listener.l7policies)
    )
    pools = []
    for pool in tree.pools:
        monitor = pool.healthmonitor
        kept = change(
            pool,
            members=tuple(member for member in pool.members if member.id != object_id),
            healthmonitor=None if monitor is None or monitor.id == object_id else monitor,
        )
        if pool.id != object_id:
            pools.append(kept)
    if tree.id == object_id:
        tree = change(tree, additional_vips=(), flavor=None, availability_zone=None, profile=type(tree.profile)())
        tree = change(tree, vip_qos_policy_id=None, vip_sg_ids=None)
    gone = object_id if object_id in {pool.id for pool in tree.pools} else None
    listeners = tuple(
        change(listener, default_pool_id=None) if gone and listener.default_pool_id == gone else listener
        for listener in listeners
    )
    return change(tree, listeners=listeners, pools=tuple(pools))
