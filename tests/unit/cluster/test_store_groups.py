# SPDX-License-Identifier: Apache-2.0
"""Groups, credentials and recorded nodes in real databases."""

import msgspec
import pytest
import sqlalchemy as sa

from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.database.claims import Claims, PassEnd
from amphora_cluster.database.tables import event_row, group_row, node_row
from amphora_cluster.model import MemberTemplate, Node, NodeState, Weight, WeightKind
from amphora_driver.errors import Conflict, ContentRefused, StoreError, UnknownObject
from amphora_driver.secret import Secret


@pytest.fixture
def stores(any_cluster, make_stores):
    return make_stores(any_cluster)


def node(name, state=NodeState.SERVING, **more):
    return Node(server_id=name, state=state, since=7.5, **more)


def claim(stores):
    (found,) = Claims(stores.database, "one", 30).claim()
    return found


def sealed(stores, name="g1"):
    query = sa.select(group_row.c.credential).where(group_row.c.id == name)
    return stores.database.read(lambda c: c.execute(query).scalar())


def test_a_group_keeps_its_definition(stores, credential):
    weight = Weight(kind=WeightKind.METADATA, key="weight", number=3)
    group = stores.add(member=MemberTemplate(ports=(80, 443), family=6, weight=weight), minimum=2)
    found = stores.groups.get("g1")
    assert (found.group, found.deleting, found.owner) == (group, False, None)
    assert found.created_at == pytest.approx(stores.database.now(), abs=30)
    renamed = msgspec.structs.replace(group, name="Gruppe \U0001f600", minimum=1)
    stores.groups.update(renamed)
    assert stores.groups.get("g1").group == renamed
    assert stores.groups.open_credential("g1", sealed(stores)) == credential, "the credential stays"
    with pytest.raises(UnknownObject):
        stores.groups.update(msgspec.structs.replace(group, id="g9"))


def test_a_change_of_another_definition_is_refused(stores):
    group = stores.add()
    stores.groups.update(msgspec.structs.replace(group, minimum=1), before=group)
    with pytest.raises(Conflict, match="another command has changed it"):
        stores.groups.update(msgspec.structs.replace(group, minimum=2), before=group)
    assert stores.groups.get("g1").group.minimum == 1


def test_an_event_does_not_move_a_due_group_behind_the_others(stores):
    stores.add("g1")
    stores.add("g2")
    for name, due_at in (("g1", 100.0), ("g2", stores.database.now() + 1000.0)):
        later = group_row.update().where(group_row.c.id == name).values(due_at=due_at)
        stores.database.write(lambda c, statement=later: c.execute(statement))
    assert stores.groups.make_due(["g1", "g2"]) == 2
    assert stores.groups.get("g1").due_at == 100.0
    assert stores.groups.get("g2").due_at <= stores.database.now() + 1.0


def test_a_group_is_found_by_name_and_by_the_beginning_of_its_id(stores):
    stores.add("ab1")
    stores.add("ab2")
    stores.add("1_%")
    assert stores.groups.find("ab2").group.id == "ab2"
    assert stores.groups.find("1").group.id == "1_%"
    with pytest.raises(UnknownObject, match="several"):
        stores.groups.find("ab")
    for wanted in ("%", "x", "ab3"):
        with pytest.raises(UnknownObject, match="no group has this name or id"):
            stores.groups.find(wanted)
    stores.add("ab", project_id="p2")
    assert stores.groups.find("ab").group.project_id == "p2", "a complete id is unique"
    assert [one.group.id for one in stores.groups.list_groups()] == ["1_%", "ab", "ab1", "ab2"]
    assert [one.group.id for one in stores.groups.list_groups("p2")] == ["ab"]


def test_names_are_unique_in_a_project(stores, credential):
    group = stores.add()
    for same in (group, msgspec.structs.replace(group, id="g2")):
        with pytest.raises(Conflict, match="group g1 has this name"):
            stores.groups.create(same, credential)
    stores.groups.create(msgspec.structs.replace(group, id="g2", project_id="p2"), credential)
    with pytest.raises(ContentRefused):
        stores.groups.update(msgspec.structs.replace(stores.add("g3"), name="g1"))


def test_a_credential_is_sealed_for_its_group(stores, credential):
    stores.add()
    stores.add("g2")
    content = sealed(stores)
    assert b"hush" not in content
    assert stores.groups.open_credential("g1", content) == credential
    with pytest.raises(StoreError, match="encrypted for another row"):
        stores.groups.open_credential("g2", content)
    new = ApplicationCredential(id="c2", secret=Secret(b"new"))
    stores.groups.update(stores.groups.get("g1").group, new)
    assert stores.groups.open_credential("g1", sealed(stores)) == new
    assert stores.groups.open_credential("g2", sealed(stores, "g2")) == credential


def test_a_group_of_a_cloud_without_keystone_has_no_credential(stores):
    group = stores.add()
    stores.groups.create(msgspec.structs.replace(group, id="g2", name="g2"), None)
    assert stores.groups.open_credential("g2", sealed(stores, "g2")) is None


def test_only_differences_of_nodes_are_written(stores):
    stores.add()
    mine = claim(stores)
    first = (node("a"), node("b", NodeState.JOINING), node("c"))
    assert stores.passes.record(mine, (), first) == first
    second = (node("a"), node("b"), node("d", NodeState.FAILED, reason="no address"))
    statements = []
    sa.event.listen(
        stores.database.engine, "before_cursor_execute", lambda *words: statements.append((words[2], words[3]))
    )
    assert stores.passes.record(mine, first, second) == second[1:]
    written = [str(given) for text, given in statements if "cluster_node" in text]
    assert written, "the listener sees the statements"
    assert not any("'a'" in given for given in written), "an equal node is not written"
    assert stores.groups.list_nodes("g1") == second
    assert stores.groups.count_nodes() == {"g1": {NodeState.SERVING: 2, NodeState.FAILED: 1}}
    (loaded,) = stores.passes.load([mine])
    assert loaded.nodes == second
    assert stores.passes.record(mine, second, ()) == ()
    assert stores.groups.list_nodes("g1") == ()


def test_a_change_of_a_state_is_an_event(stores):
    stores.add()
    mine = claim(stores)
    serving, reason = node("a"), node("a", reason="slow")
    stores.passes.record(mine, (), (serving,))
    assert stores.passes.record(mine, (serving,), (reason,)) == (), "a reason is no state"
    failed = node("a", NodeState.FAILED, reason="x" * 5000)
    end = PassEnd(claim=mine, due_at=0.0)
    assert stores.passes.finish(end, (reason,), (failed,)) == (failed,)
    newest, oldest = stores.groups.list_events("g1", 9)
    assert (newest.server_id, newest.state, newest.at, len(newest.reason)) == ("a", "failed", 7.5, 2000)
    assert (oldest.state, oldest.reason) == ("serving", "")
    assert stores.groups.list_events("g1", 1) == (newest,)
    stores.requests.purge(3600.0, stores.database.now())
    assert stores.database.read(lambda c: c.execute(sa.select(event_row)).all()) == []


def test_a_thousand_nodes_are_replaced_in_parts(stores):
    stores.add()
    mine = claim(stores)
    before = tuple(node(f"s{number:04}") for number in range(1100))
    stores.passes.record(mine, (), before)
    after = tuple(msgspec.structs.replace(one, reason="r") for one in before[:1050])
    stores.passes.record(mine, before, after)
    assert stores.groups.list_nodes("g1") == after


def test_deletion_is_repeatable_and_refuses_changes(stores):
    group = stores.add()
    stores.groups.delete("g1")
    stores.groups.delete("g1")
    assert stores.groups.get("g1").deleting
    for refused in (
        lambda: stores.groups.update(group),
        lambda: stores.tokens.create("g1", "hook", "operator"),
        lambda: stores.groups.delete("g2"),
        lambda: stores.groups.get("g2"),
    ):
        with pytest.raises(UnknownObject):
            refused()


def test_rows_of_nodes_repeat_state_and_time(stores):
    stores.add()
    stores.passes.record(claim(stores), (), (node("a", NodeState.UNHEALTHY, reason="down"),))
    row = stores.database.read(lambda c: c.execute(sa.select(node_row)).one())
    assert (row.state, row.since) == ("unhealthy", 7.5)
