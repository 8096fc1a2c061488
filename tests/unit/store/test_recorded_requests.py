# SPDX-License-Identifier: Apache-2.0
"""Rows of an accepted call; the driver tests contain further cases."""

import pytest
import sqlalchemy as sa

from amphora_driver.database.tables import desired_object, job, object_status, request
from amphora_driver.errors import UnknownObject
from amphora_driver.model.enums import Kind, L7Action, L7Compare, L7RuleType, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import L7Policy, L7Rule, Listener, LoadBalancer, Pool, Vip
from amphora_driver.store import desired_objects
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.validation import l7, regex

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


@pytest.fixture
def recorder(database):
    recorder = RequestRecorder(database, lambda node: None)
    for one in ("lb", "other"):
        recorder.create_load_balancer(LoadBalancer(id=one, project_id="demo", vip=VIP), read_back=False)
    return recorder


def generations(database, load_balancer_id):
    return list(
        database.read(
            lambda c: c.execute(
                sa.select(request.c.generation)
                .where(request.c.load_balancer_id == load_balancer_id)
                .order_by(request.c.generation)
            ).scalars()
        )
    )


def test_the_history_is_bounded_and_keeps_the_newest(recorder, database):
    for number in range(2, 261):
        recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": f"{number}"})
    assert generations(database, "lb") == list(range(51, 261)), "at 250 the requests 200 before it are removed"
    assert generations(database, "other") == [1]
    newest = sa.select(job.c.generation).where(job.c.load_balancer_id == "lb")
    assert database.read(lambda c: c.execute(newest).scalar_one()) == 260


def test_a_call_changes_several_objects_each_with_its_values(recorder, database):
    nodes = [
        Listener(id=f"li{one}", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=one)
        for one in (1, 2)
    ]
    for node in nodes:
        recorder.create_object(Kind.LISTENER, node)
    pool = Pool(id="po", loadbalancer_id="lb", protocol=PoolProtocol.HTTP)
    recorder.create_object(Kind.POOL, pool, for_listener="li1")
    waiting = sa.select(object_status.c.object_id).where(object_status.c.pending == 4)
    waits = database.read(lambda c: c.execute(waiting).scalars().all())
    assert sorted(waits) == ["lb", "li1", "po"], "Octavia has set the listener to PENDING too"
    recorder.update_object(Kind.LISTENER, "li2", {"default_pool_id": "po"})
    users = database.read(lambda c: desired_objects.users_of_pool(c, "po"))
    assert sorted(users) == [(Kind.LISTENER, "li1", "li1"), (Kind.LISTENER, "li2", "li2")]
    recorder.delete_object(Kind.POOL, "po")
    assert database.read(lambda c: desired_objects.load_tree(c, "lb")).listeners == tuple(nodes)
    rows = database.read(lambda c: c.execute(sa.select(desired_object.c.id, desired_object.c.generation)).all())
    assert {row.id: row.generation for row in rows} == {"lb": 1, "other": 1, "li1": 6, "li2": 6, "po": 6}


def test_requests_for_unrecorded_objects_are_refused(recorder, database):
    with pytest.raises(UnknownObject):
        recorder.update_object(Kind.LISTENER, "nothing", {"name": "x"})
    with pytest.raises(UnknownObject):
        recorder.fail_over("nothing")
    assert generations(database, "lb") == [1]


def test_regular_expressions_are_validated_before_the_transaction(database, monkeypatch):
    """The transaction locks its load balancer, and with SQLite all writers."""
    recorder = RequestRecorder(database, lambda node: isinstance(node, L7Rule) and l7.check_rule_pattern(node) and None)
    recorder.create_load_balancer(LoadBalancer(id="lb", project_id="demo", vip=VIP), read_back=False)
    recorder.create_object(
        Kind.LISTENER, Listener(id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=1)
    )
    recorder.create_object(Kind.L7POLICY, L7Policy(id="po", listener_id="li", action=L7Action.REJECT, position=1))
    rule = L7Rule(id="ru", l7policy_id="po", type=L7RuleType.PATH, compare_type=L7Compare.REGEX, value="^/a.*b")
    recorder.create_object(Kind.L7RULE, rule)
    run, write = regex._Code.run, database.write
    searched, writing = [], []

    def written(work):
        writing.append(True)
        try:
            return write(work)
        finally:
            writing.pop()

    monkeypatch.setattr(regex._Code, "run", lambda *words: searched.append(bool(writing)) or run(*words))
    monkeypatch.setattr(database, "write", written)
    recorder.update_object(Kind.L7RULE, "ru", {"value": "^/a.*b.*c"})
    assert searched
    assert not any(searched)
