# SPDX-License-Identifier: Apache-2.0
"""Tags, request bodies and states of Nova's servers. Pure.

Invariant: a server belongs to an amphora of this deployment if it has both tags. The request that creates the server
contains both tags. The name is for operators only.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from amphora_driver.compute.interface import Location, Machine, MachineState, Placement
from amphora_driver.compute.placement import choose_zone
from amphora_driver.model.network import Port
from amphora_driver.secret import Secret

Json = dict[str, Any]
_AMPHORA = "amphora:"
_NAMED = re.compile(r".*-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
# Names of the metadata that the backend sets for a server. Programs in the amphora can read the metadata, so the
# metadata contain no secrets.
DEPLOYMENT_KEY, AMPHORA_KEY, BOOTED_FOR_KEY = "amphora_deployment", "amphora_id", "amphora_booted_for"
IMAGE_KEY, ADDRESS_KEY = "amphora_image", "amphora_management_address"
_RUNNING = {"ACTIVE", "HARD_REBOOT", "MIGRATING", "PASSWORD", "REBOOT", "RESIZE", "REVERT_RESIZE", "VERIFY_RESIZE"}
_FAILED = {
    "DELETED",
    "ERROR",
    "PAUSED",
    "RESCUE",
    "SHELVED",
    "SHELVED_OFFLOADED",
    "SHUTOFF",
    "SOFT_DELETED",
    "SUSPENDED",
}
_MOST_FAULT = 500
_POLICIES = {Placement.REQUIRED: "anti-affinity", Placement.PREFERRED: "soft-anti-affinity"}


class BootVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A boot volume in Cinder: size in GiB, and type; None for the default type."""

    size: int
    type: str | None = None


class NewServer(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a new server.

    Attributes:
        metadata: the metadata; `server_metadata` makes it.
        port_ids: the management ports, the one of the agent first.
        user_data: the boot document, encoded as base64.
        different_hosts: servers on whose hypervisors the new server must not run.
    """

    name: str
    tags: tuple[str, ...]
    metadata: Mapping[str, str]
    flavor_id: str
    image_id: str
    port_ids: tuple[str, ...]
    user_data: Secret
    key_name: str | None = None
    volume: BootVolume | None = None
    group_id: str | None = None
    different_hosts: tuple[str, ...] = ()


def deployment_tag(deployment_id: str) -> str:
    """Return the tag of all servers of a deployment: at most 59 of the 60 characters that Nova permits."""
    return f"amphora-deployment:{deployment_id}"


def amphora_tag(amphora_id: str) -> str:
    """Return the tag of the servers of an amphora."""
    return f"{_AMPHORA}{amphora_id}"


def tagged_amphora(server: Json) -> str | None:
    """Return the amphora that a server's tags name; None without such a tag."""
    return next((one.removeprefix(_AMPHORA) for one in server.get("tags") or () if one.startswith(_AMPHORA)), None)


def named_amphora(server: Json) -> str | None:
    """Return the amphora that a server's name ends with; None if there is none."""
    found = _NAMED.fullmatch(server["name"])
    return None if found is None else found[1]


def has_tags(server: Json, tags: Iterable[str]) -> bool:
    """Whether a server has all these tags."""
    return set(tags) <= set(server.get("tags") or ())


def server_metadata(
    deployment_id: str, amphora_id: str, booted_for: str, image_id: str, address: str
) -> dict[str, str]:
    """Return the metadata of a server.

    Nova does not report the image of a server with a boot volume, and reports addresses late. The metadata has both.
    """
    return {
        DEPLOYMENT_KEY: deployment_id,
        AMPHORA_KEY: amphora_id,
        BOOTED_FOR_KEY: booted_for,
        IMAGE_KEY: image_id,
        ADDRESS_KEY: address,
    }


def server_body(new: NewServer, zone: str | None = None) -> Json:
    """Return the body that creates a server in a zone; None for Nova's choice. The body contains secrets."""
    server: Json = {
        "name": new.name,
        "flavorRef": new.flavor_id,
        "networks": [{"port": one} for one in new.port_ids],
        "tags": list(new.tags),
        "metadata": dict(new.metadata),
        "config_drive": True,
        "user_data": new.user_data.reveal().decode("ascii"),
    }
    if new.volume is None:
        server["imageRef"] = new.image_id
    else:
        server["block_device_mapping_v2"] = [_boot_volume(new.volume, new.image_id)]
    # Nova refuses null as the value of `availability_zone` and `key_name`, so missing values are left out.
    server |= {name: value for name, value in (("availability_zone", zone), ("key_name", new.key_name)) if value}
    hints: Json = {}
    if new.group_id:
        hints["group"] = new.group_id
    if new.different_hosts:
        hints["different_host"] = list(new.different_hosts)
    return {"server": server, "os:scheduler_hints": hints} if hints else {"server": server}


def _boot_volume(volume: BootVolume, image_id: str) -> Json:
    found: Json = {
        "boot_index": 0,
        "uuid": image_id,
        "source_type": "image",
        "destination_type": "volume",
        "volume_size": volume.size,
        "delete_on_termination": True,
    }
    return {**found, "volume_type": volume.type} if volume.type else found


def to_machine(server: Json) -> Machine:
    """Return a server of Nova as a machine."""
    state = state_of(server)
    metadata = server.get("metadata") or {}
    return Machine(
        compute_id=server["id"],
        state=state,
        management_address=metadata.get(ADDRESS_KEY),
        reason=reason_of(server) if state is MachineState.FAILED else "",
        image=metadata.get(IMAGE_KEY) or (server.get("image") or {}).get("id"),
        location=location_of(server),
    )


def location_of(server: Json) -> Location:
    """Return where a server runs. Nova reports an empty host before it has chosen one."""
    return Location(host=server.get("hostId") or None, zone=server.get("OS-EXT-AZ:availability_zone") or None)


def state_of(server: Json) -> MachineState:
    """Return the state of a server. An unknown status is no failure: the boot time-out decides."""
    if is_deleting(server) or server["status"] in _FAILED:
        return MachineState.FAILED
    return MachineState.RUNNING if server["status"] in _RUNNING else MachineState.BUILDING


def is_deleting(server: Json) -> bool:
    """Whether Nova is deleting a server."""
    return server.get("OS-EXT-STS:task_state") in {"deleting", "soft-deleting"}


def reason_of(server: Json) -> str:
    """Return the status of a server for an error, with the text of Nova's fault."""
    if is_deleting(server):
        return f"Nova is deleting server {server['id']}"
    fault = fault_of(server)
    return f"Nova reports status {server['status']} of server {server['id']}{': ' + fault if fault else ''}"


def fault_of(server: Json) -> str:
    """Return the text of a server's fault; its length is limited."""
    message = (server.get("fault") or {}).get("message") or ""
    return " ".join(str(message).split()).rstrip(".")[:_MOST_FAULT]


def lacked_host(server: Json) -> bool:
    """Whether the scheduler found no hypervisor for a server."""
    return "no valid host" in fault_of(server).lower()


def choose(found: Sequence[Json]) -> Json | None:
    """Return the server to keep of several of one amphora: the oldest that has not failed.

    All servers of an amphora use the same port, and Nova attaches a port to one server only. So the oldest server may
    be a failed one.
    """
    return min(found, key=lambda one: (state_of(one) is MachineState.FAILED, one["created"], one["id"]), default=None)


def management_address(port: Port) -> str | None:
    """Return the address of the agent: the first IPv4 address, otherwise the first IPv6 address.

    Neutron does not promise an order of the addresses.
    """
    addresses = [one.address for one in port.addresses]
    return min(addresses, key=lambda one: ipaddress.ip_address(one).version, default=None)


def zone_order(zones: Sequence[str], partners: Sequence[Any], failed: Iterable[Json]) -> tuple[str | None, ...]:
    """Return the zones to try, the best one first; one None without permitted zones.

    A zone in which the scheduler has just found no hypervisor is the last one.
    """
    full = {one.get("OS-EXT-AZ:availability_zone") for one in failed if lacked_host(one)}
    left = list(zones)
    ordered: list[str | None] = []
    while left:
        best = choose_zone([one for one in left if one not in full] or left, partners)
        ordered.append(best)
        left.remove(str(best))
    return tuple(ordered) or (None,)


def group_policy(placement: Placement) -> str | None:
    """Return the policy of a server group; None if there must be none."""
    return _POLICIES.get(placement)


def host_id(project_id: str, host: str) -> str:
    """Return the `hostId` that Nova reports to a project for a hypervisor (`generate_hostid` in Nova)."""
    return hashlib.sha224(f"{project_id}{host}".encode()).hexdigest()
