# SPDX-License-Identifier: Apache-2.0
"""The rows of a resize: profile, topology, generation and fail-over, or nothing after a refusal."""

import time

import msgspec
import pytest
import sqlalchemy as sa
from octavia_lib.api.drivers import data_models, exceptions
from octavia_objects import LB, NETWORK, listener, load_balancer

from amphora_driver.config import shared
from amphora_driver.database.tables import amphora, desired_object, job, object_status, request
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import Conflict, UnknownObject, UnsupportedOption
from amphora_driver.model.enums import Topology
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.plugins import Catalogue
from amphora_driver.resize import Resizer, ResizeTarget
from amphora_driver.store import desired_objects, failovers
from amphora_driver.validation.profile import changed_values, needs_new_amphorae

OLD = "30000000-0000-4000-8000-000000000001"
PAIR = {"loadbalancer_topology": "ACTIVE_STANDBY"}
TRIGGER = failovers.FailoverTrigger(cause=failovers.Cause.RESIZE, reason="it is too small", asked_by="admin")
FLAVOR = {"timeout_tunnel": 60_000, "compute_flavor": "small"}
ZONE = {"compute_zone": "east", "valid_vip_networks": [NETWORK]}


@pytest.fixture
def resizer(conf, database):
    return Resizer(shared(), database, Catalogue(shared(), database))


@pytest.fixture
def serving(provider, database):
    """A load balancer whose amphora serves it."""
    provider.loadbalancer_create(load_balancer(flavor=FLAVOR, availability_zone=ZONE))
    row = {"id": OLD, "load_balancer_id": LB, "role": "STANDALONE", "state": "ready", "heartbeat_key": b""}

    def serve(connection):
        connection.execute(job.update().values(applied=1, committed=1, dirty=False, attempts=3))
        connection.execute(object_status.update().values(pending=None, provisioning="ACTIVE"))
        connection.execute(amphora.insert().values(**row, created_at=time.time(), confirmed=1))

    database.write(serve)
    return provider


def rows(database, table):
    return database.read(lambda c: c.execute(sa.select(table)).all())


def everything(database):
    return [rows(database, one) for one in (job, desired_object, amphora, failover, request, object_status)]


def target(flavor=None, zone=None):
    return ResizeTarget(flavor=flavor, zone=zone, trigger=TRIGGER)


@pytest.mark.usefixtures("serving")
def test_another_topology_replaces_the_amphorae_in_one_transaction(resizer, database):
    found = resizer.record(LB, target({**PAIR, "compute_flavor": "large"}))
    assert found.replaced == (OLD,)
    assert changed_values(found.former.profile, found.tree.profile) == {
        "topology": (Topology.SINGLE, Topology.ACTIVE_STANDBY),
        "compute_flavor": ("small", "large"),
        "timeout_tunnel": (60_000, None),
    }
    tree = database.read(lambda c: desired_objects.load_tree(c, LB))
    assert (tree.profile, tree.flavor) == (found.tree.profile, {**PAIR, "compute_flavor": "large"})
    assert tree.profile.compute_zone == "east", "the zone stays"
    (row,) = rows(database, job)
    assert (row.topology, row.generation, row.committed, row.dirty) == ("ACTIVE_STANDBY", 2, 2, True)
    (one,) = rows(database, amphora)
    assert one.state == "retiring"
    (begun,) = rows(database, failover)
    assert (begun.cause, begun.reason, begun.asked_by) == ("resize", "it is too small", "admin")
    assert [(each.generation, each.action) for each in rows(database, request)][-1] == (2, "resize")
    assert [each.pending for each in rows(database, object_status)] == [None], "Octavia knows nothing of it"


@pytest.mark.usefixtures("serving")
def test_values_of_the_configuration_need_no_other_amphora(resizer, database):
    found = resizer.record(LB, target({"compute_flavor": "small", "connection_limit": 10}))
    assert found.replaced == ()
    (row,) = rows(database, job)
    assert (row.generation, row.dirty, row.attempts) == (2, True, 0)
    assert rows(database, failover) == []
    assert rows(database, amphora)[0].state == "ready"


@pytest.mark.usefixtures("serving")
def test_another_zone_keeps_the_flavor(resizer, database):
    found = resizer.record(LB, target(zone={"compute_zone": "west"}))
    assert changed_values(found.former.profile, found.tree.profile) == {"compute_zone": ("east", "west")}
    assert found.replaced == (OLD,)
    assert database.read(lambda c: desired_objects.load_tree(c, LB)).availability_zone == {"compute_zone": "west"}


@pytest.mark.usefixtures("serving")
def test_a_resize_during_an_uncommitted_change_leaves_that_change_uncommitted(resizer, database):
    database.write(lambda c: c.execute(job.update().values(generation=2)))
    resizer.record(LB, target(PAIR))
    (row,) = rows(database, job)
    assert (row.generation, row.committed) == (3, 1)


def test_octavia_waits_for_its_own_request(serving, database):
    serving.loadbalancer_failover_with_flavor(LB, PAIR)
    (status,) = rows(database, object_status)
    assert status.pending == 2
    assert rows(database, job)[0].committed == 1, "Octavia has not committed its transaction yet"
    assert rows(database, failover)[0].cause == "resize"


def test_the_id_of_a_flavor_is_refused(serving, database):
    before = everything(database)
    with pytest.raises(exceptions.UnsupportedOptionError, match="amphoractl loadbalancer resize"):
        serving.loadbalancer_failover_with_flavor(LB, "40000000-0000-4000-8000-000000000001")
    assert everything(database) == before


@pytest.mark.parametrize(
    ("flavor", "zone", "word"),
    [
        ({"compute_driver": "qemu"}, None, "compute backend netns, and keeps it"),
        ({"network_driver": "neutron"}, None, "network backend local, and keeps it"),
        ({"loadbalancer_topology": "RING"}, None, "loadbalancer_topology"),
        ({"unknown": 1}, None, "unknown"),
        ({**PAIR, "tls_minimum_version": "TLSv1.3"}, None, r"the oldest allowed version is TLSv1\.3"),
        (None, {"volume_zone": "ssd"}, "volume_zone"),
        (None, {"valid_vip_networks": ["another"]}, "valid_vip_networks"),
    ],
    ids=["compute backend", "network backend", "topology", "key", "a listener contradicts", "zone key", "zone's VIPs"],
)
def test_a_refused_resize_writes_nothing(serving, resizer, database, flavor, zone, word):
    old = listener(protocol="TERMINATED_HTTPS", default_tls_container_ref="ref", tls_versions=["TLSv1.2"])
    serving.listener_create(old)
    before = everything(database)
    for call in (resizer.record, resizer.preview):
        with pytest.raises(UnsupportedOption, match=word):
            call(LB, target(flavor, zone))
    assert everything(database) == before


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda c: c.execute(amphora.update().values(state="retiring")), "being replaced already"),
        (lambda c: failovers.open_failovers(c, LB, None, TRIGGER, 1.0), r"being replaced already \(fail-over 1\)"),
        (lambda c: c.execute(job.update().values(applied=0)), "being created"),
        (lambda c: c.execute(amphora.delete()), "being created"),
        (lambda c: c.execute(job.update().values(op="delete")), "being deleted"),
    ],
    ids=["retiring", "fail-over", "not served", "no amphora", "deleted"],
)
@pytest.mark.usefixtures("serving")
def test_a_busy_load_balancer_is_not_resized(resizer, database, change, word):
    database.write(change)
    before = everything(database)
    with pytest.raises(Conflict, match=word):
        resizer.record(LB, target(PAIR))
    assert everything(database) == before


@pytest.mark.usefixtures("serving")
def test_the_present_values_are_no_resize(resizer):
    with pytest.raises(Conflict, match="these values already"):
        resizer.record(LB, target(FLAVOR))


@pytest.mark.usefixtures("database")
def test_an_unknown_load_balancer_is_not_resized(resizer):
    with pytest.raises(UnknownObject):
        resizer.record(LB, target(PAIR))


@pytest.mark.usefixtures("serving")
def test_a_preview_writes_nothing(resizer, database):
    before = everything(database)
    assert resizer.preview(LB, target(PAIR)).replaced == (OLD,)
    assert everything(database) == before


@pytest.mark.usefixtures("serving")
def test_topology_and_backend_stay_after_a_change_of_the_defaults(database, resizer):
    shared().set_override("loadbalancer_topology", "ACTIVE_STANDBY", "amp_controller")
    shared().set_override("enabled_drivers", ["netns"], "amp_compute")
    shared().set_override("driver", "qemu", "amp_compute")
    found = resizer.record(LB, target({"compute_flavor": "large"}))
    assert (found.tree.profile.topology, found.tree.profile.compute) == (Topology.SINGLE, "netns")


def test_an_update_of_the_user_keeps_the_new_profile(serving, resizer, database):
    resizer.record(LB, target(PAIR))
    new = data_models.LoadBalancer(loadbalancer_id=LB, name="renamed")
    serving.loadbalancer_update(load_balancer(), new)
    tree = database.read(lambda c: desired_objects.load_tree(c, LB))
    assert (tree.name, tree.profile.topology) == ("renamed", Topology.ACTIVE_STANDBY)


# The values that reach an amphora in a bundle. Machine and ports depend on all other fields of a profile.
_PUSHED = {
    *("timeout_client_data", "timeout_member_connect", "timeout_member_data", "timeout_tunnel"),
    *("timeout_client_data_minimum", "timeout_member_connect_minimum", "timeout_member_data_minimum"),
    *("timeout_client_data_maximum", "timeout_member_connect_maximum", "timeout_member_data_maximum"),
    *("timeout_http_request", "connection_limit", "process_connection_limit", "process_threads"),
    *("tls_minimum_version", "tls_ciphers", "connection_logging", "log_format", "vrrp_advert_interval"),
    *("warm_spares", "client_address"),
    # These values reach an amphora with its settings, without a push.
    *("admin_log_targets", "tenant_log_targets"),
}


@pytest.mark.parametrize("field", sorted(set(Profile.__struct_fields__) - {"compute", "network"}))
def test_each_field_of_a_profile_needs_other_amphorae_or_a_push(field):
    values = {"topology": Topology.ACTIVE_STANDBY, "compute_zones": ("a", "b")}
    new = msgspec.structs.replace(Profile(), **{field: values.get(field, "another")})
    assert needs_new_amphorae(Profile(), new) is (field not in _PUSHED)
