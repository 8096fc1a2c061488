# SPDX-License-Identifier: Apache-2.0
"""Bodies, states and tags of Nova's servers."""

import hashlib
import uuid

import msgspec
import pytest
from nova_answers import AMPHORA, TAGS, failed, port, server

from amphora_driver.compute import nova_servers as servers
from amphora_driver.compute.interface import BootPartner, Location, Machine, MachineState, Placement
from amphora_driver.compute.nova_servers import BootVolume, NewServer
from amphora_driver.secret import Secret

NEW = NewServer(
    name="octavia-amphora-1",
    tags=("a", "b"),
    metadata={"key": "value"},
    flavor_id="flavor",
    image_id="image",
    port_ids=("port-1", "port-2"),
    user_data=Secret(b"e30="),
)
BODY = {
    "name": "octavia-amphora-1",
    "flavorRef": "flavor",
    "imageRef": "image",
    "networks": [{"port": "port-1"}, {"port": "port-2"}],
    "tags": ["a", "b"],
    "metadata": {"key": "value"},
    "config_drive": True,
    "user_data": "e30=",
}
VOLUME = {
    "boot_index": 0,
    "uuid": "image",
    "source_type": "image",
    "destination_type": "volume",
    "volume_size": 4,
    "delete_on_termination": True,
}


@pytest.mark.parametrize(
    ("changes", "zone", "added", "hints"),
    [
        ({}, None, {}, None),
        ({}, "az1", {"availability_zone": "az1"}, None),
        ({"key_name": "ops"}, None, {"key_name": "ops"}, None),
        ({"group_id": "g"}, None, {}, {"group": "g"}),
        ({"different_hosts": ("s",)}, None, {}, {"different_host": ["s"]}),
        ({"group_id": "g", "different_hosts": ("s", "t")}, None, {}, {"group": "g", "different_host": ["s", "t"]}),
    ],
)
def test_the_body_of_a_server(changes, zone, added, hints):
    wanted = {"server": {**BODY, **added}, **({"os:scheduler_hints": hints} if hints else {})}
    assert servers.server_body(msgspec.structs.replace(NEW, **changes), zone) == wanted


@pytest.mark.parametrize("kind", [None, "fast"])
def test_a_boot_volume_replaces_the_image(kind):
    found = servers.server_body(msgspec.structs.replace(NEW, volume=BootVolume(size=4, type=kind)))["server"]
    assert found["block_device_mapping_v2"] == [{**VOLUME, **({"volume_type": kind} if kind else {})}]
    assert "imageRef" not in found


def test_no_text_of_a_new_server_has_its_user_data():
    assert "e30" not in repr(NEW)


def test_tags_have_the_permitted_length():
    assert len(servers.deployment_tag("x" * 40)) <= 60
    assert len(servers.amphora_tag(str(uuid.uuid4()))) <= 60


@pytest.mark.parametrize(
    ("status", "task", "state"),
    [
        ("BUILD", "spawning", MachineState.BUILDING),
        ("REBUILD", None, MachineState.BUILDING),
        ("UNKNOWN", None, MachineState.BUILDING),
        ("A_FUTURE_STATUS", None, MachineState.BUILDING),
        ("ACTIVE", None, MachineState.RUNNING),
        ("MIGRATING", "migrating", MachineState.RUNNING),
        ("HARD_REBOOT", "rebooting_hard", MachineState.RUNNING),
        ("ACTIVE", "deleting", MachineState.FAILED),
        ("BUILD", "deleting", MachineState.FAILED),
        ("ERROR", None, MachineState.FAILED),
        ("SHUTOFF", None, MachineState.FAILED),
        ("DELETED", None, MachineState.FAILED),
        ("SOFT_DELETED", None, MachineState.FAILED),
        ("PAUSED", None, MachineState.FAILED),
        ("SUSPENDED", None, MachineState.FAILED),
        ("SHELVED_OFFLOADED", None, MachineState.FAILED),
        ("RESCUE", None, MachineState.FAILED),
    ],
)
def test_states(status, task, state):
    assert servers.to_machine(server(status=status, **{"OS-EXT-STS:task_state": task})).state is state


def test_a_running_server_is_a_machine():
    assert servers.to_machine(server()) == Machine(
        compute_id="server-1",
        state=MachineState.RUNNING,
        management_address="192.0.2.7",
        image="image-0",
        location=Location(host="hash-1", zone="az1"),
    )


def test_the_image_of_a_server_with_a_boot_volume_is_in_its_metadata():
    assert servers.to_machine(server(image="")).image == "image-0"
    assert servers.to_machine(server(image="", metadata={})).image is None
    assert servers.to_machine(server(metadata={})).image == "image-0"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            failed(message="No valid host was found. "),
            "Nova reports status ERROR of server server-1: No valid host was found",
        ),
        (server(status="SHUTOFF"), "Nova reports status SHUTOFF of server server-1"),
        (server(**{"OS-EXT-STS:task_state": "deleting"}), "Nova is deleting server server-1"),
        (server(), ""),
    ],
)
def test_the_reason_is_the_text_of_novas_fault(found, reason):
    assert servers.to_machine(found).reason == reason


def test_a_long_fault_is_shortened():
    assert len(servers.fault_of(failed(message="x" * 9999))) == 500


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ([], None),
        ([server("a"), server("b", created="2026-11-24T09:00:00Z")], "b"),
        ([server("b"), server("a")], "a"),
        ([failed("a", created="2026-11-24T09:00:00Z"), server("b")], "b"),
        ([server("a", **{"OS-EXT-STS:task_state": "deleting"}), server("b", "BUILD")], "b"),
        ([failed("b"), failed("a")], "a"),
    ],
)
def test_the_oldest_server_that_works_is_kept(found, kept):
    chosen = servers.choose(found)
    assert (chosen and chosen["id"]) == kept


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        ((), None),
        (("192.0.2.7",), "192.0.2.7"),
        (("2001:db8::7",), "2001:db8::7"),
        (("2001:db8::7", "192.0.2.7", "192.0.2.8"), "192.0.2.7"),
    ],
)
def test_the_management_address(addresses, chosen):
    assert servers.management_address(port(addresses=addresses)) == chosen


def partner(zone):
    return BootPartner(amphora_id="p", compute_id="p", location=Location(host="h", zone=zone))


@pytest.mark.parametrize(
    ("zones", "partners", "found", "order"),
    [
        ((), [], [], (None,)),
        ((), [partner("az1")], [failed()], (None,)),
        (("az1", "az2"), [], [], ("az1", "az2")),
        (("az1", "az2"), [partner("az1")], [], ("az2", "az1")),
        # The only free zone has just had no hypervisor: a pair in one zone is better than half of a pair.
        (("az1", "az2"), [partner("az2")], [failed()], ("az2", "az1")),
        (("az1", "az2"), [partner("az2")], [failed(message="Disk error")], ("az1", "az2")),
        (("az1",), [], [failed()], ("az1",)),
    ],
)
def test_the_order_of_zones(zones, partners, found, order):
    assert servers.zone_order(zones, partners, found) == order


def test_names_and_tags_of_amphorae():
    assert servers.named_amphora(server()) == AMPHORA
    # Octavia's own provider uses this name; `machines` lists servers with the tag of the deployment only.
    assert servers.named_amphora({"name": f"amphora-{AMPHORA}"}) == AMPHORA
    assert servers.named_amphora({"name": "octavia-amphora-x"}) is None
    assert servers.tagged_amphora(server()) == AMPHORA
    assert servers.tagged_amphora({"tags": ["amphora-deployment:one"]}) is None
    assert servers.has_tags(server(), TAGS)
    assert not servers.has_tags(server(tags=TAGS[:1]), TAGS)


def test_a_host_is_hashed_as_nova_does():
    assert servers.host_id("p", "h") == hashlib.sha224(b"ph").hexdigest()


@pytest.mark.parametrize(
    ("placement", "policy"),
    [(Placement.NONE, None), (Placement.PREFERRED, "soft-anti-affinity"), (Placement.REQUIRED, "anti-affinity")],
)
def test_policies_of_server_groups(placement, policy):
    assert servers.group_policy(placement) == policy
