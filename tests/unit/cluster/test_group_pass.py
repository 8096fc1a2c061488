# SPDX-License-Identifier: Apache-2.0
"""Passes over groups with a real database and a cloud in memory."""

import math

import msgspec
import pytest
import sqlalchemy as sa
from memory_cloud import BUSY, OUTAGE, MemoryCloud

from amphora_cluster.cloud.errors import Busy, CredentialRefused, Missing
from amphora_cluster.controller.elapsed import ElapsedTimes
from amphora_cluster.controller.group_pass import GroupPass, PassSettings
from amphora_cluster.database.claims import Claims
from amphora_cluster.database.tables import group_row
from amphora_cluster.metrics import METRICS
from amphora_cluster.model import Node, NodeState, Request, RequestKind
from amphora_driver.errors import UnknownObject

POLL, STATISTICS_AGE = 5.0, 12.0


class Scene:
    """A group, its cloud, and a clock that the test moves."""

    def __init__(self, stores, **more):
        self.stores, self.cloud = stores, MemoryCloud()
        self.group = stores.add(**more)
        # The clock of the passes stands still between the steps of a test.
        self.clock = self.steady = stores.database.now()
        self.jumped_at = -math.inf
        self.claims = Claims(stores.database, "one", 30)
        self.start()

    def start(self):
        """Start a controller."""
        settings = PassSettings(poll_interval=POLL, retry_first=1.0, retry_most=60.0, statistics_age=STATISTICS_AGE)
        elapsed = ElapsedTimes(lambda: self.steady - self.jumped_at, lambda: self.steady)
        self.group_pass = GroupPass(
            self.stores.passes, self.now, self.stores.groups.open_credential, self.cloud.get, settings, elapsed
        )

    def set_clock(self, seconds):
        self.clock += seconds
        self.jumped_at = self.steady

    def now(self):
        return self.clock

    def step(self, seconds=0.0):
        """Run one pass after some seconds; return the pause until the next one, and whether the pass wrote itself."""
        self.clock += seconds
        self.steady += seconds
        past = {"due_at": 0.0}
        self.stores.database.write(lambda c: c.execute(group_row.update().values(**past)))
        (claim,) = self.claims.claim()
        (claimed,) = self.stores.passes.load([claim])
        end = self.group_pass.run(claimed)
        if end is not None:
            self.claims.end_passes([end])
        row = self.stores.database.read(lambda c: c.execute(sa.select(group_row)).first())
        if row is None:
            return None, True
        assert row.owner is None, "each pass returns its lease"
        return row.due_at - self.now(), end is None

    def states(self):
        return {node.server_id: node.state for node in self.stores.groups.list_nodes("g1")}

    def request(self, kind, *servers, **more):
        return self.stores.requests.add(Request(id="", group_id="g1", kind=kind, servers=servers, **more))

    def outcome(self, request):
        return self.stores.requests.get("g1", request.id)

    def serve(self, *names):
        """Boot servers and let them serve."""
        self.cloud.boot(*names)
        self.step()
        self.cloud.check()
        self.step(1.0)
        assert set(self.states().values()) == {NodeState.SERVING}


@pytest.fixture
def stores(sqlite_cluster, make_stores):
    return make_stores(sqlite_cluster)


@pytest.fixture
def scene(stores):
    return Scene(stores, drain_seconds=10)


def test_servers_join_and_serve(scene):
    scene.cloud.boot("a", "b")
    pause, wrote = scene.step()
    assert (scene.cloud.served(), scene.states()) == (["a", "b"], {"a": NodeState.JOINING, "b": NodeState.JOINING})
    assert (0.9 < pause < 1.1, wrote) == (True, False), "the record before the steps is still true"
    scene.cloud.check()
    pause, wrote = scene.step(1.0)
    assert set(scene.states().values()) == {NodeState.SERVING}
    assert (POLL - 0.5 < pause <= POLL, wrote) == (True, True)


def test_a_pass_without_a_difference_writes_nothing(scene):
    scene.serve("a", "b")
    statements = []
    sa.event.listen(scene.stores.database.engine, "before_cursor_execute", lambda *words: statements.append(words[2]))
    pause, wrote = scene.step(5.0)
    assert (POLL - 0.5 < pause <= POLL, wrote) == (True, False)
    words = {text.split(" ")[0] for text in statements if "cluster_" in text}
    writes = [text for text in statements if text.startswith(("INSERT", "DELETE", "UPDATE"))]
    assert words == {"SELECT", "UPDATE"}
    assert len(writes) == 3, "the update of the test, the claim, and the end of the pass"
    assert [name for name, _ in scene.cloud.calls[-2:]] == ["servers", "read_pool"], "two reads of the cloud"


def test_nodes_are_recorded_before_the_steps(scene):
    scene.cloud.boot("a")
    seen = []
    scene.cloud.after = lambda _: seen.append(scene.states())
    scene.step()
    assert seen == [{"a": NodeState.JOINING}]


def test_a_crash_after_the_steps_is_completed_by_another_controller(scene):
    scene.serve("a", "b")
    request = scene.request(RequestKind.LEAVE, "a")

    def crash(_):
        raise SystemExit

    scene.cloud.after = crash
    with pytest.raises(SystemExit):
        scene.step()
    assert scene.states() == {"a": NodeState.DRAINING, "b": NodeState.SERVING}
    scene.claims.release_all("one")
    scene.claims = Claims(scene.stores.database, "two", 30)
    scene.cloud.after = lambda _: None
    for seconds in (0.0, 1.0, 11.0, 1.0):
        scene.step(seconds)
    assert scene.cloud.served() == ["b"]
    assert scene.outcome(request).outcome == {"a": ""}


def test_a_leave_ends_when_the_server_is_drained_and_removed(scene):
    scene.serve("a", "b")
    request = scene.request(RequestKind.LEAVE, "a")
    scene.step()
    assert scene.cloud.served() == ["b"]
    assert scene.outcome(request).ended_at is None
    pause, _ = scene.step(1.0)
    assert pause > 4.0, "the drain lasts for ten seconds, and the group polls"
    assert scene.outcome(request).ended_at is None
    assert "a" in {one.name for one in scene.cloud.members.values()}
    scene.step(10.5)
    scene.step(1.0)
    assert {one.name for one in scene.cloud.members.values()} == {"b"}
    assert scene.outcome(request).outcome == {"a": ""}
    assert scene.states()["a"] is NodeState.LEFT


def test_a_clock_that_is_set_forwards_ends_no_drain(scene):
    scene.serve("a", "b")
    request = scene.request(RequestKind.LEAVE, "a")
    scene.step()
    scene.step(1.0)
    scene.set_clock(3600.0)
    scene.step()
    pause, _ = scene.step(9.0)
    assert "a" in {one.name for one in scene.cloud.members.values()}
    assert scene.outcome(request).ended_at is None, "the leave has not failed either"
    assert 0.9 < pause < 1.1, "the rest of the drain"
    scene.step(1.0)
    assert {one.name for one in scene.cloud.members.values()} == {"b"}
    scene.step(1.0)
    assert scene.outcome(request).outcome == {"a": ""}


def test_a_drain_lasts_longer_after_a_restart_by_its_own_length_at_most(scene):
    scene.serve("a", "b")
    scene.request(RequestKind.LEAVE, "a")
    scene.step()
    scene.step(1.0)
    scene.set_clock(3600.0)
    scene.start()
    scene.step(9.0)
    scene.step(9.5)
    assert "a" in {one.name for one in scene.cloud.members.values()}
    scene.step(0.5)
    assert {one.name for one in scene.cloud.members.values()} == {"b"}


def test_a_clock_that_is_set_forwards_fails_no_join(scene):
    scene.cloud.boot("a")
    request = scene.request(RequestKind.JOIN, "a")
    scene.step()
    scene.set_clock(3600.0)
    scene.step(1.0)
    assert (scene.states(), scene.outcome(request).outcome) == ({"a": NodeState.JOINING}, {})
    scene.cloud.check()
    scene.step(1.0)
    assert scene.outcome(request).outcome == {"a": ""}


@pytest.mark.parametrize("known", [False, True])
def test_a_join_awaits_the_first_good_check_of_a_server_that_boots(scene, known):
    """The group added the server before it answers; `known` if a pass saw the failed checks before the request."""
    scene.serve("a", "b")
    scene.cloud.check(up=False)
    if known:
        scene.step(1.0)
        assert scene.states() == {"a": NodeState.UNHEALTHY, "b": NodeState.UNHEALTHY}
    request = scene.request(RequestKind.JOIN, "a")
    pause, _ = scene.step(1.0)
    assert (scene.states()["a"], scene.outcome(request).ended_at) == (NodeState.UNHEALTHY, None)
    assert 0.9 < pause < 1.1, "no notification announces the recovery"
    scene.set_clock(3600.0)
    pause, _ = scene.step(1.0)
    assert (0.9 < pause < 1.1, scene.outcome(request).ended_at) == (True, None)
    scene.cloud.check()
    pause, _ = scene.step(1.0)
    assert (scene.states()["a"], scene.outcome(request).outcome) == (NodeState.SERVING, {"a": ""})
    assert POLL - 0.5 < pause <= POLL


def test_a_join_of_a_server_that_does_not_recover_ends_with_the_reason(scene):
    scene.serve("a", "b")
    scene.cloud.check(up=False)
    request = scene.request(RequestKind.JOIN, "a")
    scene.step()
    scene.step(scene.group.join_timeout - 1.0)
    assert scene.outcome(request).ended_at is None
    scene.step(1.0)
    assert "operating status ERROR" in scene.outcome(request).outcome["a"]
    assert scene.states()["a"] is NodeState.UNHEALTHY, "a caller may replace it"


def test_expected_servers_are_not_read_one_by_one(scene):
    scene.serve("a")
    request = scene.request(RequestKind.JOIN, "b")
    scene.step()
    scene.step(5.0)
    assert scene.cloud.known == {"a"}
    scene.cloud.boot("b")
    scene.step(5.0)
    scene.cloud.check()
    scene.step(1.0)
    assert scene.outcome(request).outcome == {"b": ""}
    assert scene.cloud.known == {"a", "b"}


def test_a_request_by_count_chooses_once(scene):
    scene.serve("a", "b", "c")
    request = scene.request(RequestKind.LEAVE, count=2)
    scene.step()
    chosen = scene.outcome(request).servers
    assert len(chosen) == 2
    assert scene.cloud.calls[-3] == ("servers", True), "a request may name a server that was just created"
    scene.step(1.0)
    assert scene.outcome(request).servers == chosen
    assert len(scene.cloud.served()) == 1


def test_a_request_below_the_minimum_is_refused_at_once(scene):
    scene.stores.groups.update(msgspec.structs.replace(scene.group, minimum=2))
    scene.serve("a", "b")
    before = METRICS.requests.labels("refused")._value.get()
    request = scene.request(RequestKind.LEAVE, "a")
    scene.step()
    found = scene.outcome(request)
    assert "minimum" in found.refusal
    assert found.ended_at is not None
    assert scene.cloud.served() == ["a", "b"]
    assert METRICS.requests.labels("refused")._value.get() == before + 1


def test_a_refused_step_names_the_server_and_the_others_continue(scene):
    scene.cloud.refusals = {"a": "the subnet is unknown"}
    scene.cloud.boot("a", "b")
    request = scene.request(RequestKind.JOIN, "a", "b")
    scene.step()
    scene.cloud.check()
    pause, _ = scene.step(1.0)
    assert scene.states() == {"a": NodeState.FAILED, "b": NodeState.SERVING}
    assert scene.outcome(request).outcome == {"a": "the subnet is unknown", "b": ""}
    assert pause > POLL - 0.5, "the refused step is not repeated every second"
    events = scene.stores.groups.list_events("g1", 99)
    scene.step(5.0)
    scene.step(5.0)
    assert scene.stores.groups.list_events("g1", 99) == events, "a repeated refusal is no event"
    scene.cloud.refusals = {}
    scene.step(5.0)
    scene.cloud.check()
    scene.step(1.0)
    assert scene.states() == {"a": NodeState.SERVING, "b": NodeState.SERVING}


def test_a_refused_removal_fails_the_leave(scene):
    scene.serve("a", "b")
    request = scene.request(RequestKind.LEAVE, "a")
    scene.step()
    scene.step(1.0)
    scene.cloud.refusals = {"a": "the deletion is refused"}
    scene.step(11.0)
    assert scene.outcome(request).outcome == {"a": "the deletion is refused"}


@pytest.mark.parametrize("fault", [BUSY, Busy("change", "immutable", refused={"a": "no address"})])
def test_a_busy_load_balancer_is_tried_again_after_a_second(scene, fault):
    scene.cloud.boot("a", "b")
    scene.cloud.faults = {"apply": fault}
    pause, _ = scene.step()
    assert 0.9 < pause < 1.1
    record = scene.stores.groups.get("g1")
    assert (record.error, record.attempts) == (None, 0)
    assert scene.states()["a"] is (NodeState.FAILED if fault.refused else NodeState.JOINING)
    for _ in range(60):
        pause, _ = scene.step(0.01)
    assert pause > POLL - 0.5, "a load balancer that stays busy is polled"
    scene.cloud.faults = {}
    pause, _ = scene.step()
    assert pause < 1.1
    assert scene.cloud.served() == ["a", "b"]


def test_a_pending_load_balancer_is_read_again_after_a_second(scene):
    scene.cloud.boot("a")
    scene.cloud.changeable = False
    pause, _ = scene.step()
    assert 0.9 < pause < 1.1
    assert ("apply", (("join", "a"),)) not in scene.cloud.calls


@pytest.mark.parametrize("call", ["servers", "read_pool", "apply"])
def test_an_outage_is_recorded_and_tried_again_with_a_back_off(scene, call):
    scene.serve("a")
    scene.cloud.boot("b")
    scene.cloud.faults = {call: OUTAGE}
    pauses = [scene.step()[0] for _ in range(9)]
    assert all(0.75 * 2**number < pause <= 2**number + 0.1 for number, pause in enumerate(pauses[:6]))
    assert all(40 < pause < 60.1 for pause in pauses[6:])
    record = scene.stores.groups.get("g1")
    assert "no service" in record.error
    assert record.attempts == 9
    assert scene.states()["a"] is NodeState.SERVING, "an outage changes no state"
    scene.cloud.faults = {}
    scene.step()
    record = scene.stores.groups.get("g1")
    assert (record.error, record.attempts) == (None, 0)


def test_an_unexpected_error_stops_no_other_group(scene, caplog):
    scene.cloud.boot("a")
    scene.cloud.faults = {"read_pool": KeyError("hush")}
    pause, _ = scene.step()
    assert 0.7 < pause < 1.1
    assert scene.stores.groups.get("g1").error == "The pass failed with an unexpected error: KeyError."
    assert "Traceback" in caplog.text


def test_a_credential_of_another_group_is_an_error_of_the_pass(scene):
    scene.stores.database.write(lambda c: c.execute(group_row.update().values(credential=b"nonsense")))
    scene.step()
    assert "none of the encryption keys decrypts it" in scene.stores.groups.get("g1").error
    assert scene.cloud.calls == []


def test_a_request_ends_if_no_pass_succeeds(scene):
    scene.cloud.faults = {"servers": CredentialRefused("read servers", "the credential is revoked", final=True)}
    request = scene.request(RequestKind.LEAVE, "a")
    scene.step()
    assert scene.outcome(request).ended_at is None
    pause, wrote = scene.step(scene.group.join_timeout + scene.group.drain_seconds + 1.0)
    found = scene.outcome(request)
    assert "the credential is revoked" in found.refusal
    assert "the credential is revoked" in found.outcome["a"]
    assert (pause > 1.0, wrote) == (True, True)
    assert scene.stores.groups.get("g1").attempts == 2


def test_a_lost_lease_ends_the_pass_before_the_steps(scene):
    scene.cloud.boot("a")
    (claim,) = scene.claims.claim()
    (claimed,) = scene.stores.passes.load([claim])
    scene.stores.database.write(lambda c: c.execute(group_row.update().values(owner="two", epoch=9)))
    assert scene.group_pass.run(claimed) is None
    assert [name for name, _ in scene.cloud.calls] == ["servers", "read_pool"]
    assert scene.states() == {}


def test_connections_are_read_while_servers_drain_only(scene):
    scene.serve("a", "b")
    assert not any(about for name, about in scene.cloud.calls if name == "read_pool")
    scene.request(RequestKind.LEAVE, "a")
    scene.step()
    scene.cloud.connections = 0
    scene.step(1.0)
    assert scene.cloud.calls[-1] == ("read_pool", True)
    scene.step(10.0)
    scene.step(1.0)
    scene.step(5.0)
    assert scene.states()["a"] is NodeState.LEFT
    assert scene.cloud.calls[-1] == ("read_pool", False)


def test_a_drain_ends_early_after_the_configured_age_of_statistics(stores):
    scene = Scene(stores, drain_seconds=100)
    scene.serve("a", "b")
    scene.request(RequestKind.LEAVE, "a")
    scene.step()
    scene.cloud.connections = 0
    scene.step(1.0)
    scene.step(STATISTICS_AGE - 1.0)
    assert len(scene.cloud.members) == 2
    scene.step(1.0)
    assert len(scene.cloud.members) == 1


# --- deletion ---


def test_a_deleted_group_drains_its_servers_first(scene):
    scene.stores.groups.update(msgspec.structs.replace(scene.group, minimum=2))
    scene.serve("a", "b")
    scene.cloud.members["foreign"] = msgspec.structs.replace(
        next(iter(scene.cloud.members.values())), id="foreign", name="foreign", address="192.0.2.99", tags=("other",)
    )
    scene.stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.JOIN, servers=("c",)))
    scene.stores.groups.delete("g1")
    scene.step()
    assert scene.cloud.served() == ["foreign"], "the minimum does not prevent the deletion"
    scene.step(1.0)
    assert len(scene.cloud.members) == 3
    scene.step(10.5)
    assert scene.step(1.0) == (None, True)
    assert [one.name for one in scene.cloud.members.values()] == ["foreign"]
    assert scene.cloud.load_balancer == "ACTIVE", "the group does not own it"
    with pytest.raises(UnknownObject):
        scene.stores.groups.get("g1")


def test_a_deleted_group_deletes_its_own_load_balancer(stores):
    scene = Scene(stores, owns_load_balancer=True, drain_seconds=0)
    scene.serve("a")
    stores.groups.delete("g1")
    scene.step()
    pause, _ = scene.step(1.0)
    assert (scene.cloud.load_balancer, 1.9 < pause < 2.1) == ("PENDING_DELETE", True)
    scene.cloud.faults = {"delete_load_balancer": BUSY}
    pause, _ = scene.step(2.0)
    assert 1.9 < pause < 2.1
    scene.cloud.faults = {}
    scene.cloud.load_balancer = "DELETED"
    assert scene.step(2.0) == (None, True)


@pytest.mark.parametrize(("owns", "state"), [(True, "PENDING_DELETE"), (False, "ACTIVE")])
def test_an_own_load_balancer_in_error_is_deleted_with_its_members(stores, owns, state):
    scene = Scene(stores, owns_load_balancer=owns, drain_seconds=0)
    scene.serve("a")
    stores.groups.delete("g1")
    scene.cloud.changeable, scene.cloud.failed = False, True
    scene.step()
    assert (scene.cloud.load_balancer, len(scene.cloud.members)) == (state, 1)


def test_the_deletion_continues_without_the_source_of_the_servers(scene):
    scene.serve("a")
    scene.cloud.faults = {"servers": Missing("read servers", "no such server group", final=True)}
    scene.stores.groups.delete("g1")
    pause, _ = scene.step()
    assert (scene.cloud.members, 0.9 < pause < 1.1) == ({}, True)
    assert scene.step(1.0) == (None, True)


def test_a_failed_node_of_a_deleted_group_prevents_nothing(scene):
    scene.cloud.boot("a", status="ERROR")
    scene.step()
    assert scene.states() == {"a": NodeState.FAILED}
    scene.stores.groups.delete("g1")
    assert scene.step() == (None, True)


def test_metrics_count_passes_and_changes(scene):
    done = METRICS.passes.labels("done")._value.get()
    joins, moves = METRICS.steps.labels("join")._value.get(), METRICS.moves.labels("joining")._value.get()
    scene.cloud.boot("a", "b")
    scene.step()
    assert METRICS.passes.labels("done")._value.get() == done + 1
    assert METRICS.steps.labels("join")._value.get() == joins + 2
    assert METRICS.moves.labels("joining")._value.get() == moves + 2
    assert isinstance(scene.stores.groups.list_nodes("g1")[0], Node)
