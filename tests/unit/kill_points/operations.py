# SPDX-License-Identifier: Apache-2.0
"""The table of operations, with the state before each of them and the checks after it.

Each state comes from an operation without kills.
"""

import time
from functools import partial

import sqlalchemy as sa
import users
from dataplane.pki import Authority
from deployment import SECOND_SUBNET
from processes import CERTIFICATES, DETECTION, HEALTH, ROTATION
from runs import Operation
from unit.driver.octavia_objects import LB, LISTENER, POOL, member

from amphora_driver.certificates import trust_store
from amphora_driver.database.tables import amphora, job
from amphora_driver.resize import Resizer, ResizeTarget
from amphora_driver.store import ca_records, failovers, rotations, spare_pools
from amphora_driver.store.ca_records import CaKind
from amphora_driver.store.rotations import ItemState, Selection

PAIR = {"loadbalancer_topology": "ACTIVE_STANDBY"}
SINGLE = {"loadbalancer_topology": "SINGLE"}
SLOW = {"timeout_client_data": 90_000}
SPARED = {"warm_spares": 1}
_DAY = 86_400.0
_CERTIFICATE = Authority("root").issue("www.example.com")
_TERMINATED = {
    "protocol": "TERMINATED_HTTPS",
    "protocol_port": 443,
    "default_tls_container_ref": "one",
    "default_tls_container_data": {
        "certificate": _CERTIFICATE.certificate_pem,
        "private_key": _CERTIFICATE.key_pem,
        "passphrase": None,
        "intermediates": [],
    },
}


# -- events without a user ---------------------------------------------------------------------------------------------


def _operator_replaces_the_holder(deployment):
    """Write the same row as `amphoractl amphora failover`, for the VIP holder."""
    why = failovers.FailoverTrigger(cause=failovers.Cause.OPERATOR, reason="an operator wants it", asked_by="test")
    holder, now = deployment.cloud.kept.read()["holder"], deployment.database.now()
    assert deployment.database.write(lambda c: failovers.open_failovers(c, LB, [holder], why, now)) == 1


def _operator_resizes(deployment):
    """Write the same rows as `amphoractl loadbalancer resize`."""
    why = failovers.FailoverTrigger(cause=failovers.Cause.RESIZE, reason="an operator wants it", asked_by="test")
    Resizer(deployment.conf, deployment.database, deployment.catalogue).record(
        LB, ResizeTarget(flavor=SINGLE, trigger=why)
    )


def _machine_ends(deployment):
    (only,) = deployment.amphorae()
    deployment.cloud.power_off(only)


def _operator_rotates(deployment):
    deployment.database.write(lambda c: rotations.request_rotation(c, Selection(everything=True), 1, "test"))


def _nothing(deployment):
    """No event: only time passes."""


# -- initial states ----------------------------------------------------------------------------------------------------


def _addresses_are_late(deployment):
    with deployment.cloud.kept.open() as state:
        state["late"] = 2


def _certificates_age(deployment):
    issued = amphora.c.certificate_issued_at - 5 * _DAY
    old = {"certificate_issued_at": issued, "certificate_expires_at": issued + 7 * _DAY}
    deployment.database.write(lambda c: c.execute(amphora.update().values(**old)))


def _authorities_rotate(deployment):
    for kind in CaKind:
        new, present = (
            trust_store.create_ca(kind, deployment.vault, 30),
            trust_store.load_configured_ca(deployment.conf, kind),
        )
        begin = partial(ca_records.begin_ca_rotation, kind=kind, configured=present, new=new, now=1.0)
        deployment.database.write(begin)


def _done(name, before, machines=0, **more):
    return Operation(name=name, beginning=before, machines=machines, **more)


def _pool_is_full(deployment):
    return [
        len(deployment.database.read(partial(spare_pools.list_ready_spares, pool_id=one))) for one in _pools(deployment)
    ] == [1]


def _pools(deployment):
    return [row.load_balancer_id for row in deployment.database.read(spare_pools.list_pools)]


BEGINNINGS = {
    "alone": _done("alone", "nothing", 1, request=users.create()),
    "served": _done("served", "nothing", 1, request=users.create(populated=True), duties=(HEALTH,)),
    "pair": _done("pair", "nothing", 2, request=users.create(PAIR, populated=True), duties=(HEALTH,), amphorae=2),
    "spared": _done(
        "spared", "nothing", 2, request=users.create(SPARED, populated=True), amphorae=2, until=_pool_is_full
    ),
    "two networks": _done("two networks", "served", request=users.add_member(3, subnet_id=SECOND_SUBNET)),
    "late addresses": _done("late addresses", "nothing", amphorae=0, happens=_addresses_are_late),
    "aged": _done("aged", "served", happens=_certificates_age),
    "rotating authorities": _done("rotating authorities", "served", happens=_authorities_rotate),
}


# -- final checks ------------------------------------------------------------------------------------------------------


def _all_online(deployment):
    assert set(deployment.octavia.operating.values()) == {"ONLINE"}, deployment.octavia.operating
    assert deployment.octavia.operating.keys() == deployment.octavia.provisioning.keys()


def _replacement_begun(deployment):
    return len(deployment.replacements()) == 1


def _no_pool_left(deployment):
    return not _pools(deployment)


def _authorities_settled(deployment):
    found = deployment.database.read(ca_records.list_cas)
    return all(one.state is ca_records.CaState.CURRENT for one in found)


def _certificate_is_new(deployment):
    (issued,) = deployment.scalars(amphora.c.certificate_issued_at)
    return issued > time.time() - _DAY


def _renewed(deployment):
    assert all(machine["certificate"] for machine in deployment.cloud.kept.read()["machines"].values())


def _two_authorities(deployment):
    """Only the new CA of each kind is left."""
    found = deployment.database.read(ca_records.list_cas)
    assert sorted(one.kind for one in found) == sorted(CaKind)
    assert {one.id for one in found} == {2, 4}


def _rotated(deployment):
    items = deployment.database.read(lambda c: rotations.list_items(c, 1))
    assert [one.state for one in items] == [ItemState.DONE]


def _resized(topology):
    """The topology and its amphorae are the new ones; only a pair has VRRP."""

    def check(deployment):
        (recorded,) = deployment.scalars(job.c.topology)
        assert recorded == topology
        bundles = [machine["bundle"] for machine in deployment.cloud.kept.read()["machines"].values()]
        peers = [len(one["vrrp"]["peers"]) if one.get("vrrp") else 0 for one in bundles]
        assert peers == ([1, 1] if topology == "ACTIVE_STANDBY" else [0])
        assert {one.cause for one in deployment.replacements()} <= {"resize"}

    return check


def _secrets(number):
    def check(deployment):
        assert len(deployment.read(sa.text("SELECT * FROM secret"))) == number

    return check


def _ports(networks):
    def check(deployment):
        (machine,) = deployment.cloud.kept.read()["machines"].values()
        assert len(machine["ports"]) == networks

    return check


def _options_told(deployment):
    ((options, ports),) = deployment.cloud.kept.read()["options"].values()
    assert (options.qos_policy_id, len(ports)) == (_POLICY, 1)
    (noted,) = deployment.scalars(job.c.vip_applied)
    assert _POLICY in noted


_POLICY = "40000000-0000-4000-8000-000000000001"
_MEMBER_3 = {member(3).member_id}
_TREE = {LB, LISTENER, POOL, *(member(number).member_id for number in (1, 2))}
OPERATIONS = [
    _done("create alone", "nothing", 1, request=users.create()),
    _done("create a pair", "nothing", 2, request=users.create(PAIR, populated=True), duties=(HEALTH,), amphorae=2),
    _done("addresses come late", "late addresses", 1, request=users.create()),
    _done("change a member", "served", request=users.change_member(1, weight=7)),
    _done("set members", "served", request=users.set_members((1, 2), (2, 4))),
    _done("add a network", "served", request=users.add_member(3, subnet_id=SECOND_SUBNET), check=_ports(2)),
    _done("leave a network", "two networks", request=users.remove_member(3), deletes=_MEMBER_3, check=_ports(1)),
    _done(
        *("set VIP options", "served"),
        request=users.change_load_balancer(vip_qos_policy_id=_POLICY),
        check=_options_told,
    ),
    _done("end TLS", "alone", request=users.add_listener(terminated=_TERMINATED), check=_secrets(2)),
    _done("delete alone", "alone", request=users.delete(), deletes={LB}, amphorae=0),
    _done("delete with children", "served", request=users.delete(cascade=True), deletes=_TREE, amphorae=0),
    _done("fail over", "served", 1, request=users.fail_over(), replaced=1),
    _done("fail over a pair", "pair", 2, request=users.fail_over(), duties=(HEALTH,), amphorae=2, replaced=2),
    _done(
        *("replace the holder", "pair", 1),
        happens=_operator_replaces_the_holder,
        duties=(HEALTH,),
        amphorae=2,
        replaced=1,
    ),
    _done(
        *("resize to a pair", "served", 2),
        request=users.resize(PAIR),
        duties=(HEALTH,),
        amphorae=2,
        replaced=1,
        check=_resized("ACTIVE_STANDBY"),
    ),
    _done(
        *("resize to a single one", "pair", 1),
        happens=_operator_resizes,
        duties=(HEALTH,),
        replaced=2,
        check=_resized("SINGLE"),
    ),
    _done("resize in place", "served", request=users.resize(SLOW), check=_resized("SINGLE")),
    _done(
        *("a machine ends", "served", 1),
        happens=_machine_ends,
        duties=(HEALTH, DETECTION),
        replaced=1,
        until=_replacement_begun,
    ),
    _done("join a pool", "nothing", 2, request=users.create(SPARED), amphorae=2, until=_pool_is_full),
    _done("adopt a spare", "spared", 1, request=users.fail_over(), amphorae=2, replaced=1, until=_pool_is_full),
    _done(
        *("leave a pool", "spared"),
        request=users.delete(cascade=True),
        deletes=_TREE,
        amphorae=0,
        until=_no_pool_left,
    ),
    _done("rotate", "served", 1, happens=_operator_rotates, duties=(HEALTH, ROTATION), replaced=1, check=_rotated),
    _done(
        *("renew a certificate", "aged"),
        happens=_nothing,
        duties=(CERTIFICATES,),
        until=_certificate_is_new,
        check=_renewed,
    ),
    _done(
        *("rotate authorities", "rotating authorities"),
        happens=_nothing,
        duties=(CERTIFICATES,),
        until=_authorities_settled,
        check=_two_authorities,
    ),
    _done("hear amphorae", "served", happens=_nothing, duties=(HEALTH,), check=_all_online),
]
