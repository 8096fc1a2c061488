# SPDX-License-Identifier: Apache-2.0
"""Leases of groups: one owner at a time; a former owner writes nothing."""

import pytest
import sqlalchemy as sa

from amphora_cluster.database.claims import Claims, PassEnd
from amphora_cluster.database.tables import group_row, node_row
from amphora_cluster.model import Node, NodeState, Request, RequestKind
from amphora_driver.errors import LeaseLost

NODE = Node(server_id="s1", state=NodeState.SERVING, since=5.0)


@pytest.fixture
def stores(any_cluster, make_stores):
    return make_stores(any_cluster)


def rows(stores):
    return {row.id: row for row in stores.database.read(lambda c: c.execute(sa.select(group_row)).all())}


def change(stores, **values):
    stores.database.write(lambda c: c.execute(group_row.update().values(**values)))


def expire(stores):
    change(stores, leased_until=stores.database.now() - 1.0)


def end(stores, claim, later=60.0, **more):
    return PassEnd(claim=claim, due_at=stores.database.now() + later, **more)


def test_two_controllers_never_own_the_same_group(stores):
    stores.add()
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    (claim,) = one.claim(5)
    assert (claim.group_id, claim.epoch, claim.attempts) == ("g1", 1, 0)
    assert two.claim() == one.claim() == ()
    one.end_passes([end(stores, claim, -1.0)])
    (claim,) = two.claim()
    assert claim.epoch == 2


def test_one_transaction_claims_and_returns_several_groups(stores):
    for name in ("g1", "g2", "g3"):
        stores.add(name)
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    mine = one.claim(2)
    (other,) = two.claim(2)
    assert {claim.group_id for claim in (*mine, other)} == {"g1", "g2", "g3"}
    one.end_passes([end(stores, claim) for claim in mine])
    found = rows(stores)
    assert [found[claim.group_id].owner for claim in mine] == [None, None]
    assert found[other.group_id].owner == "two"
    assert one.claim(9) == (), "the next pass is due later"


def test_the_longest_due_group_comes_first(stores):
    for name, age in (("g1", 10), ("g2", 30), ("g3", 20)):
        stores.add(name)
        due = stores.database.now() - age
        stores.database.write(lambda c, n=name, d=due: c.execute(
            group_row.update().where(group_row.c.id == n).values(due_at=d)
        ))  # fmt: skip
    claims = Claims(stores.database, "one", 30)
    assert [claims.claim()[0].group_id for _ in range(3)] == ["g2", "g3", "g1"]


def test_an_expired_lease_is_taken_over_and_its_former_owner_writes_nothing(stores):
    stores.add()
    request = stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.SYNC))
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    (old,) = one.claim()
    (loaded,) = stores.passes.load([old])
    expire(stores)
    (new,) = two.claim()
    assert (new.epoch, new.attempts) == (old.epoch + 1, 1), "a lost lease counts as a failed pass"
    for late in (
        lambda: stores.passes.record(old, (), (NODE,), loaded.requests),
        lambda: stores.passes.finish(end(stores, old), (), (NODE,), loaded.requests),
        lambda: stores.passes.remove(old),
    ):
        with pytest.raises(LeaseLost):
            late()
    one.end_passes([end(stores, old, -5.0, error="late")])
    found = rows(stores)["g1"]
    assert (found.owner, found.epoch, found.error) == ("two", new.epoch, None)
    assert stores.groups.list_nodes("g1") == ()
    assert stores.requests.get("g1", request.id).ended_at is None
    one.renew([old])
    expire(stores)
    one.renew([old])
    assert Claims(stores.database, "three", 30).claim() != (), "a former owner cannot renew the lease"


def test_an_event_during_a_pass_makes_the_group_due_again(stores):
    stores.add()
    claims = Claims(stores.database, "one", 30)
    (claim,) = claims.claim()
    assert stores.groups.make_due(["g1"]) == 1
    claims.end_passes([end(stores, claim)])
    (claim,) = claims.claim()
    stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.SYNC))
    stores.passes.finish(end(stores, claim), (), ())
    (claim,) = claims.claim()
    claims.end_passes([end(stores, claim)])
    assert claims.claim() == ()


def test_servers_and_projects_make_their_groups_due(stores):
    for name, project in (("g1", "p1"), ("g2", "p1"), ("g3", "p2")):
        stores.add(name, project_id=project)
    claims = Claims(stores.database, "one", 30)
    for claim in claims.claim(9):
        servers = {"g1": ("a", "b"), "g2": ("b",), "g3": ("c",)}[claim.group_id]
        nodes = tuple(Node(server_id=one, state=NodeState.SERVING, since=1.0) for one in servers)
        stores.passes.finish(end(stores, claim), (), nodes)

    def due():
        found = claims.claim(9)
        claims.end_passes([end(stores, claim) for claim in found])
        return {claim.group_id for claim in found}

    assert due() == set()
    stores.groups.make_due(server_ids=["b", "unknown"])
    assert due() == {"g1", "g2"}
    stores.groups.make_due(server_ids=["c"], project_ids=["p1"])
    assert due() == {"g1", "g2", "g3"}
    assert stores.groups.make_due() == 0


def test_a_failed_pass_records_its_error_and_a_success_removes_it(stores):
    stores.add()
    claims = Claims(stores.database, "one", 30)
    (claim,) = claims.claim()
    claims.end_passes([end(stores, claim, -1.0, error="x" * 5000, attempts=1)])
    found = stores.groups.get("g1")
    assert (len(found.error), found.attempts, found.passed_at) == (2000, 1, None)
    assert claims.claim(fresh=True) == (), "the last pass failed"
    (claim,) = claims.claim()
    assert claim.attempts == 1
    claims.end_passes([end(stores, claim, -1.0)])
    found = stores.groups.get("g1")
    assert (found.error, found.attempts) == (None, 0)
    assert found.passed_at == pytest.approx(stores.database.now(), abs=30)
    (claim,) = claims.claim(fresh=True)
    claims.end_passes([end(stores, claim, error="again", attempts=1)])
    assert stores.groups.get("g1").passed_at == found.passed_at


def test_leases_are_renewed_until_their_release(stores):
    stores.add()
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    (claim,) = one.claim()
    expire(stores)
    one.renew([claim])
    assert two.claim() == ()
    assert one.release_all() == 1
    assert rows(stores)["g1"].attempts == 0, "an orderly end is no crash"
    assert two.claim() != ()


def test_leases_of_a_dead_process_are_released_with_a_back_off(stores):
    stores.add()
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    one.claim()
    assert two.release_all("one") == 1
    assert rows(stores)["g1"].attempts == 1
    assert two.claim() != (), "the first crash delays nothing"
    assert Claims(stores.database, "three", 30).release_all("two") == 1
    assert two.claim() == (), "the second one does"


def test_implausible_times_are_corrected(stores):
    for name in ("g1", "g2"):
        stores.add(name)
    claims = Claims(stores.database, "one", 30)
    assert claims.clamp_due_times(100.0) == 0
    (claim,) = claims.claim()
    change(stores, leased_until=stores.database.now() + 9000.0, due_at=stores.database.now() + 9000.0)
    assert claims.clamp_due_times(100.0) >= 2
    (other,) = claims.claim(5)
    assert other.group_id != claim.group_id
    assert rows(stores)[claim.group_id].leased_until < stores.database.now() + 31.0


def test_a_locked_row_does_not_end_other_leases(stores):
    if stores.database.engine.dialect.name == "sqlite":
        pytest.skip("it locks no rows")
    for name in ("g1", "g2"):
        stores.add(name)
    one, two = Claims(stores.database, "one", 30), Claims(stores.database, "two", 30)
    claims = one.claim(2)
    expire(stores)

    def hold(connection):
        connection.execute(group_row.update().where(group_row.c.id == "g1").values(error="busy"))
        one.renew(claims)

    stores.database.write(hold)
    assert [claim.group_id for claim in two.claim(5)] == ["g1"], "the renewal skipped the locked row"


def test_a_claim_skips_rows_that_another_controller_claims_now(stores):
    if stores.database.engine.dialect.name == "sqlite":
        pytest.skip("it locks no rows")
    for name in ("g1", "g2"):
        stores.add(name)
    found = []

    def hold(connection):
        first = sa.select(group_row.c.id).where(group_row.c.id == "g1").with_for_update()
        connection.execute(first)
        found.extend(Claims(stores.database, "two", 30).claim(5))

    stores.database.write(hold)
    assert [claim.group_id for claim in found] == ["g2"]


def test_a_removed_group_leaves_no_rows(stores):
    stores.add()
    stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.SYNC))
    stores.tokens.create("g1", "hook", "operator")
    claims = Claims(stores.database, "one", 30)
    (claim,) = claims.claim()
    stores.passes.record(claim, (), (NODE,))
    stores.groups.delete("g1")
    (loaded,) = stores.passes.load([claim])
    assert loaded.deleting
    stores.passes.remove(claim)
    assert stores.passes.load([claim]) == ()
    claims.end_passes([end(stores, claim)])
    assert stores.groups.list_groups() == ()
    assert stores.database.read(lambda c: c.execute(sa.select(node_row)).all()) == []
    assert stores.groups.list_events("g1", 9) == ()
    assert stores.tokens.list_tokens("g1") == ()
