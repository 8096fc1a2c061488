# SPDX-License-Identifier: Apache-2.0
"""VIP requests and VIP options: when a backend is asked, and when it is asked again."""

import json
import time

import migrated
import msgspec
import pytest
import sqlalchemy as sa
from test_plan import TREE, amphora, port, wanted

from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, request, vip_claim
from amphora_driver.errors import Conflict, NetworkError, UnsupportedOption
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, Vip, without_addresses
from amphora_driver.model.network import ListenerRule, VipOptions, VipRequest
from amphora_driver.network.interface import NotYet, PortPurpose, PortRequest
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vip_allocation
from amphora_driver.reconcile.steps import Plug
from amphora_driver.reconcile.vip_allocation import AppliedVipOptions, VipSteps
from amphora_driver.store import desired_objects as store
from amphora_driver.store import vip_claims
from amphora_driver.store.vip_claims import PendingVipRequest

BARE = without_addresses(TREE)
GUARDED = msgspec.structs.replace(TREE, vip_qos_policy_id="q1", vip_sg_ids=("g2", "g1"))
OPTIONS = VipOptions(qos_policy_id="q1", security_group_ids=("g1", "g2"))
BOOTING = amphora(state=AmphoraState.BOOTING, management_address=None, plugged=(), confirmed=0)
FOUND = (Vip(address="198.51.100.99", subnet_id="s1", network_id="n1", port_id="p9"),)


def names(want, *observed):
    return [type(step).__name__ for step in planning.plan(want, observed)]


@pytest.mark.parametrize(
    ("want", "observed", "steps"),
    [
        pytest.param({"tree": BARE}, (), ["Record"], id="an amphora is recorded first"),
        pytest.param({"tree": BARE}, (BOOTING,), ["Boot"], id="the amphora boots before the VIP request"),
        pytest.param({"tree": BARE}, (amphora(plugged=(), confirmed=0),), ["AllocateVip"], id="the backend is asked"),
        pytest.param(
            {"tree": BARE, "allocate_at": 7.0, "now": 6.0},
            (amphora(plugged=(), confirmed=0),),
            ["Await"],
            id="asked recently",
        ),
        pytest.param({"tree": BARE, "gone": True}, (), ["ReleaseVip"], id="deleted before an answer"),
        pytest.param({"tree": GUARDED}, (amphora(confirmed=3),), ["ApplyVipOptions"], id="options before the push"),
        pytest.param(
            {"tree": GUARDED, "vip_given": AppliedVipOptions(options=OPTIONS, ports=("p-n1",))},
            (amphora(confirmed=3),),
            ["Push"],
            id="options applied",
        ),
        pytest.param(
            {"tree": GUARDED, "vip_given": AppliedVipOptions(options=OPTIONS, ports=("p-other",))},
            (amphora(confirmed=3),),
            ["ApplyVipOptions"],
            id="a new amphora",
        ),
        pytest.param(
            {"tree": GUARDED, "vip_given": AppliedVipOptions(options=OPTIONS, refused="no")},
            (amphora(confirmed=3),),
            ["Push"],
            id="refused: not asked again",
        ),
        pytest.param(
            {"tree": TREE, "vip_given": AppliedVipOptions(options=OPTIONS, ports=("p-n1",))},
            (amphora(confirmed=3),),
            ["ApplyVipOptions"],
            id="options removed",
        ),
        pytest.param({"tree": TREE}, (amphora(confirmed=3),), ["Push"], id="no options"),
        pytest.param(
            {"tree": GUARDED, "vip_given": AppliedVipOptions(options=OPTIONS, ports=("p-n1",)), "applied": 4},
            (amphora(plugged=(port(), port("n2", ("s2",)))),),
            ["Unplug"],
            id="ports of other networks",
        ),
    ],
)
def test_the_plan_of_vip_requests_and_options(want, observed, steps):
    assert names(wanted(**want), *observed) == steps


def test_retry_times_grow_unless_the_backend_sets_one():
    wish = PendingVipRequest(project_id="demo", vips=(VipRequest(subnet_id="s1"),), since=0.0)
    pauses = []
    for _ in range(7):
        now = wish.again_at
        wish = vip_claims.schedule_retry(wish, "busy", None, now)
        pauses.append(wish.again_at - now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert vip_claims.schedule_retry(wish, "busy", 0.5, 10.0).again_at == 10.5


class Backend:
    """Gives one answer, and records the requests."""

    listener_rules = False

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def allocate_vip(self, *asked):
        self.asked.append(asked)
        return self._say()

    def apply_vip_options(self, *asked):
        self.asked.append(asked)
        self._say()

    def _say(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/driver.sqlite"
    migrated.write(url)
    database = Database(url)

    def write(connection):
        connection.execute(job.insert().values(load_balancer_id="lb", op="apply", generation=4, committed=4))
        store.insert_objects(connection, "lb", 4, [BARE])
        wish = PendingVipRequest(
            project_id="demo", vips=(VipRequest(subnet_id="s1", address="198.51.100.99"),), since=time.time()
        )
        vip_claims.write_pending_request(connection, "lb", "local", wish)

    database.write(write)
    yield database
    database.dispose()


def row(database):
    return database.read(lambda c: c.execute(sa.select(job)).one())


def steps(database, error_after=60.0):
    return VipSteps(database, database.write, error_after)


def test_an_answer_becomes_the_next_generation(database):
    backend = Backend(FOUND)
    steps(database).allocate(backend, BARE, None, 4, ["m1"])
    assert backend.asked == [("lb", "demo", (VipRequest(subnet_id="s1", address="198.51.100.99"),), ["m1"])]
    tree = database.read(lambda c: store.load_tree(c, "lb"))
    assert tree.vips == FOUND
    assert (row(database).generation, row(database).committed) == (5, 5)
    assert database.read(lambda c: vip_claims.read_pending_request(c, "lb")) is None


def test_a_missing_answer_changes_only_the_pending_request(database):
    steps(database).allocate(Backend(NotYet(reason="busy", again_in=9.0)), BARE, None, 4, [])
    wish = database.read(lambda c: vip_claims.read_pending_request(c, "lb"))
    assert (wish.reason, wish.attempts, wish.project_id) == ("busy", 2, "demo")
    assert wish.vips[0].address == "198.51.100.99", "the pending request keeps the requested address"
    assert database.read(lambda c: vip_allocation.next_request_at(c, "lb", time.time())) == pytest.approx(
        time.time() + 9.0, abs=5
    )
    assert database.read(lambda c: vip_allocation.next_request_at(c, "lb", time.time() - 3600)) == 0.0, (
        "the clock is set back"
    )
    assert row(database).generation == 4


def test_a_long_wait_is_an_error_and_the_request_is_retried(database):
    with pytest.raises(NetworkError, match=r"none in \d+ s: busy") as error:
        steps(database, error_after=-1.0).allocate(Backend(NotYet(reason="busy")), BARE, None, 4, [])
    assert error.value.final
    assert database.read(lambda c: vip_claims.read_pending_request(c, "lb")).attempts == 2


def test_a_refusal_is_reported_to_the_user(database):
    with pytest.raises(Conflict, match="none left"):
        steps(database).allocate(Backend(Conflict("take a VIP", "none left")), BARE, None, 4, [])


def test_a_pending_claim_is_not_settled(database):
    database.write(lambda c: c.execute(vip_claim.update().values(claimed_at=0.0)))
    assert database.read(lambda c: vip_claims.list_settled_claims(c, time.time())) == ([], [])
    database.write(lambda c: vip_claims.clear_pending_request(c, "lb"))
    assert database.read(lambda c: vip_claims.list_settled_claims(c, time.time() + 1)) == ([], ["lb"])


def test_applied_options_are_recorded_and_removed(database):
    backend = Backend(None)
    steps(database).apply(backend, GUARDED, [amphora()], 4)
    assert backend.asked == [("lb", "demo", OPTIONS, ("p-n1",))]
    assert vip_allocation.read_applied_options(row(database)) == AppliedVipOptions(
        options=OPTIONS, ports=("p-n1",), generation=4
    )
    steps(database).apply(backend, TREE, [amphora()], 5)
    assert backend.asked[-1] == ("lb", "demo", VipOptions(), ("p-n1",))
    assert row(database).vip_applied is None


def test_refused_options_are_retried_after_the_users_next_change(database):
    steps(database).apply(Backend(UnsupportedOption("apply", "no such group")), GUARDED, [amphora()], 4)
    given = vip_allocation.read_applied_options(row(database))

    def asked(generation):
        values = {"action": "x", "object_id": "lb", "accepted_at": 0.0, "generation": generation}
        database.write(lambda c: c.execute(request.insert().values(load_balancer_id="lb", **values)))
        return database.read(lambda c: vip_allocation.read_refusal(c, "lb", given))

    assert "no such group" in asked(4)["lb"]
    assert asked(5) == {}
    assert json.loads(row(database).vip_applied)["refused"]


LISTENERS = (
    Listener(id="l1", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80),
    Listener(
        id="l2",
        loadbalancer_id="lb",
        protocol=ListenerProtocol.UDP,
        protocol_port=53,
        allowed_cidrs=("2001:db8::/32", "10.0.0.0/8"),
    ),
    Listener(id="l3", loadbalancer_id="lb", protocol=ListenerProtocol.TCP, protocol_port=22, admin_state_up=False),
)
RULES = (
    ListenerRule(protocol="tcp", port=80),
    ListenerRule(protocol="udp", port=53, cidr="10.0.0.0/8"),
    ListenerRule(protocol="udp", port=53, cidr="2001:db8::/32"),
)


def test_listener_rules_are_options_of_a_backend_that_needs_them():
    tree = msgspec.structs.replace(TREE, listeners=LISTENERS)
    assert vip_allocation.desired_options(tree) == VipOptions()
    options = vip_allocation.desired_options(tree, listener_rules=True)
    assert options.listener_rules == RULES, "sorted, without the disabled listener"
    given = AppliedVipOptions(options=options, ports=("p-n1",))
    fewer = msgspec.structs.replace(TREE, listeners=LISTENERS[1:])
    assert names(wanted(tree=tree, vip_given=given, listener_rules=True), amphora(confirmed=3)) == ["Push"]
    assert names(wanted(tree=fewer, vip_given=given, listener_rules=True), amphora(confirmed=3)) == ["ApplyVipOptions"]


def test_a_port_request_names_the_vips_and_options_on_their_network_only():
    tree = msgspec.structs.replace(
        GUARDED, additional_vips=(Vip(address="2001:db8::9", subnet_id="s6", network_id="n1", port_id="p1"),)
    )
    view = wanted(tree=tree)
    vip_port = vip_allocation.request_port(
        Plug(amphora_id="a1", network_id="n1", subnet_ids=("s1", "s6"), reason="a test"), view
    )
    assert vip_port == PortRequest(
        amphora_id="a1",
        network_id="n1",
        subnet_ids=("s1", "s6"),
        purpose=PortPurpose.VIP,
        load_balancer_id="lb",
        project_id="demo",
        vips=(tree.vip.address, "2001:db8::9"),
        options=OPTIONS,
    )
    member_port = vip_allocation.request_port(
        Plug(amphora_id="a1", network_id="n2", subnet_ids=("s2",), reason="a test"), view
    )
    assert (member_port.purpose, member_port.vips, member_port.options) == (PortPurpose.MEMBER, (), VipOptions())
