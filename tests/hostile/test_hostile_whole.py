# SPDX-License-Identifier: Apache-2.0
"""Hostile text in every string field of a whole load balancer: the directives match the model.

One `haproxy -c` reads all rendered texts. Bisection finds the load balancer at fault.
"""

from __future__ import annotations

from functools import lru_cache

import trees
from haproxy_versions import every_version, machine, write_files
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from outcomes import CHECKS, nodes, shown
from reading import placed
from test_hostile_corpus import AcceptedTree, complaints
from wholes import counted, expected, wholes

from amphora_agent.haproxy.config_parser import parse
from amphora_driver.errors import UnsupportedOption
from amphora_driver.render.haproxy import render


def unserved(tree) -> set[str]:
    """Return the objects that the driver refuses; a refused policy or rule counts as its listener."""
    found = {node.id for node in nodes(tree) if node.id[0] not in "yr" and objects(node)}
    for listener in tree.listeners:
        for policy in listener.l7policies:
            rules = [rule for rule in policy.rules if rule.admin_state_up]
            if policy.admin_state_up and (objects(policy) or any(map(objects, rules))):
                found.add(listener.id)
    return found


def objects(node) -> bool:
    try:
        CHECKS[node.id[0]](node)
    except UnsupportedOption:
        return True
    return False


@settings(max_examples=max(80, settings.default.max_examples))
@given(wholes())
def test_the_directives_are_those_of_the_model(tree):
    rendered = render(tree)
    refused = {error.object_id for error in rendered.refused}
    assert refused <= {node.id for node in nodes(tree)}
    for error in rendered.refused:
        shown(error)
    assert not unserved(tree) - refused, "the renderer accepts an object that the driver refuses"
    wanted = expected(tree, refused)
    found = counted(list(placed(rendered.text)))
    assert found.pop(("defaults",), None) is not None or rendered.text is None
    assert found == wanted
    if rendered.text is not None:
        kinds = [(section.kind, section.name) for section in parse(rendered.text).sections]
        assert sorted(kinds[1:]) == sorted(wanted)


SERVED = 80
ROUNDS = 7
"""Runs of Hypothesis, each with as many examples as three quarters of the wanted trees.

Hypothesis draws constants of the modules that a process has loaded, and mutates its earlier examples. Of 100 trees of
one run, 50 to 93 were served. The share in all runs is practically never below a fifth.
"""


@lru_cache
def generated() -> tuple[AcceptedTree, ...]:
    """Return trees with at least one served object, from as many runs as necessary."""
    wanted = max(SERVED, settings.default.max_examples)
    found: list[AcceptedTree] = []

    def collect(data):
        tree = data.draw(wholes(str(len(found))))
        first = 2 * len(found) + 1
        ported = (trees.change(one, protocol_port=first + i) for i, one in enumerate(tree.listeners))
        tree = trees.change(tree, listeners=tuple(ported))
        rendered = render(tree)
        if rendered.text is not None:
            found.append(AcceptedTree("a whole load balancer", rendered.text, rendered))

    for number in range(ROUNDS):
        run = settings(max_examples=wanted * 3 // 4)(given(st.data())(collect))
        (seed(number)(run) if settings.default.derandomize else run)()
        if len(found) >= wanted:
            return tuple(found[:wanted])
    raise AssertionError(f"only {len(found)} trees have a served object")


@every_version
def test_haproxy_accepts_the_rendered_texts(version, tmp_path):
    version.here()
    files = [file for each in generated() for file in each.rendered.files]
    write_files(files, tmp_path)
    machine(tmp_path, files)
    assert complaints(version, generated(), tmp_path) == []
