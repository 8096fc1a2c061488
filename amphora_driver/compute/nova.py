# SPDX-License-Identifier: Apache-2.0
"""The compute backend of OpenStack: servers of Nova from images of Glance.

Invariant: a server has the tags of the deployment and of its amphora from its creation on. The backend changes and
deletes only servers with both tags. Nova has no token for idempotent creation. So each boot first searches for the
tags, and the backend never repeats a request that creates a server. The constructor connects to no service.
`docs/reference/nova.md` describes the objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from amphora_driver.compute import nova_servers as servers
from amphora_driver.compute.config_drive import build_user_data
from amphora_driver.compute.interface import BootPartner, BootRequest, Location, Machine, MachineState, Placement
from amphora_driver.compute.nova_client import Json, Nova
from amphora_driver.compute.nova_profiles import Profiles
from amphora_driver.compute.nova_servers import BootVolume, NewServer
from amphora_driver.compute.placement import choose_zone
from amphora_driver.compute.state_dirs import agent_files
from amphora_driver.deadline import part_of_current
from amphora_driver.errors import ComputeError, ConfigurationError
from amphora_driver.model.network import Port
from amphora_driver.network.interface import Network, management_port
from amphora_driver.openstack.errors import ApiError, translated_for_compute
from amphora_driver.openstack.glance import Images
from amphora_driver.openstack.session import Service

if TYPE_CHECKING:
    from oslo_config import cfg

LOG = logging.getLogger(__name__)
# Shortest and longest pause in seconds between two queries about a change in Nova. Each pause is twice the previous
# one.
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 1.0
# Seconds to wait until an attached port is active. Afterwards, the job continues with the inactive port.
_ACTIVE_SECONDS = 5.0
_USE = "use the compute backend nova"


class CloudNetwork(Network, Protocol):
    """A network backend whose ports Nova can attach."""

    def management_ports(self, amphora_id: str) -> tuple[Port, ...]:
        """The ports of this amphora on its management networks."""

    def require_network(self, network_id: str) -> None:
        """Check that a network exists; raise `UnsupportedOption` if not."""


class NovaCompute:
    """Runs amphorae as servers of an OpenStack cloud.

    Args:
        conf: the options of the driver.
        network: creates the management ports.

    Raises:
        ConfigurationError: a required option is missing.
    """

    supports: ClassVar[frozenset[str]] = frozenset(
        {"compute_flavor", "amp_image_tag", "compute_zone", "compute_zones", "volume_zone", "management_network"}
    )
    wiring: ClassVar[str] = "nova"
    # Nova refuses to attach a port to a server that is being built.
    plugs_while_booting: ClassVar[bool] = False

    def __init__(self, conf: cfg.ConfigOpts, network: CloudNetwork) -> None:
        options, deployment_id = conf.amp_compute_nova, conf.amp_openstack.deployment_id
        _require(options, deployment_id)
        self.listing_interval: float = options.listing_interval
        self.default_zones: tuple[str, ...] = tuple(options.zones)
        self._options = options
        self._network = network
        self._deployment_id: str = deployment_id
        self._tag = servers.deployment_tag(deployment_id)
        self._nova = Nova(Service(conf, "compute", "nova", options.request_timeout), options.page_size)
        glance = Service(conf, "image", "glance", options.request_timeout)
        self._profiles = Profiles(
            self._nova,
            Images(glance, options.image_owner, options.cache_time),
            image_owner=options.image_owner,
            network=network,
            cache_time=options.cache_time,
            boot_volume=options.boot_volume_size > 0,
            default_zones=options.zones,
        )

    def validate_profile(self, metadata: Mapping[str, object]) -> None:
        """Check that flavor, image, zones and network exist. A cache limits the number of requests.

        Raises:
            UnsupportedOption: one of these objects does not exist.
            ComputeError: a service of the cloud does not answer.
        """
        self._profiles.validate(metadata)

    def can_separate(self, partners: Sequence[BootPartner], zones: Sequence[str]) -> bool:
        """Whether a new server can be separated from its partners, by zones or by known hypervisors.

        nova-compute reports a server to the scheduler at the end of its build. Until then, neither `different_host` nor
        a server group with soft anti-affinity excludes its hypervisor.
        """
        zone = choose_zone(zones or self.default_zones, partners)
        if zone is not None and all(one.location.zone not in (None, zone) for one in partners):
            return True
        found = [self.get(one.amphora_id) for one in partners]
        return all(one is None or one.state is not MachineState.BUILDING for one in found)

    def boot(self, request: BootRequest) -> Machine:
        """Create a server for the amphora, or return the existing one. A failed server is replaced."""
        wanted = f"boot amphora {request.amphora_id}"
        with translated_for_compute(wanted):
            found = self._find(request.amphora_id)
            kept = servers.choose(found)
            if kept is not None and servers.state_of(kept) is not MachineState.FAILED:
                self._delete_duplicates(request.amphora_id, kept, found)
                return servers.to_machine(kept)
            if found:
                # At the end of a deletion, Nova unbinds the server's ports, even if another server uses them. The new
                # server gets the same ports, so the deletion must end first.
                self._remove(request.amphora_id, found, wanted)
            return self._create(request, found, wanted)

    def image(self, tag: str | None) -> str | None:
        """The id of the newest image of the owner with this tag; None if unknown. The result is cached."""
        chosen = tag or self._options.image_tag
        try:
            with translated_for_compute(f"find the image {chosen!r}"):
                return self._profiles.image_id(chosen, cached=True)
        except ComputeError as error:
            LOG.warning(
                "the compute backend could not read the current image, so all machines keep their images: %s", error
            )
            return None

    def machines(self) -> frozenset[str]:
        """The amphora ids of all servers of the deployment. Their names have the ids."""
        with translated_for_compute("list amphorae"):
            found = self._nova.list_servers(self._tag, detail=False)
        return frozenset(filter(None, map(servers.named_amphora, found)))

    def get(self, amphora_id: str) -> Machine | None:
        """The amphora's server; None if it does not exist."""
        with translated_for_compute(f"look up amphora {amphora_id}"):
            kept = servers.choose(self._find(amphora_id))
        return None if kept is None else servers.to_machine(kept)

    def locations(self) -> dict[str, Location]:
        """The current locations of all servers of the deployment by amphora id."""
        with translated_for_compute("list the locations of amphorae"):
            found = self._nova.list_servers(self._tag, detail=True)
        by_amphora: dict[str, list[Json]] = {}
        for one in found:
            if (amphora_id := servers.tagged_amphora(one)) and servers.has_tags(one, [self._tag]):
                by_amphora.setdefault(amphora_id, []).append(one)
        chosen = {amphora_id: servers.choose(several) for amphora_id, several in by_amphora.items()}
        return {amphora_id: servers.location_of(one) for amphora_id, one in chosen.items() if one is not None}

    def host_names(self, name: str) -> frozenset[str]:
        """Return the name of a hypervisor, and the hash that Nova shows to this project instead of the name."""
        return frozenset({name, servers.host_id(self._nova.project_id(), name)})

    def release_load_balancer(self, load_balancer_id: str) -> None:
        """Delete the server group of a load balancer, with the option `server_groups` only."""
        if not self._options.server_groups:
            return
        with translated_for_compute(f"delete the server group of load balancer {load_balancer_id}"):
            for one in self._nova.server_groups(self._group_name(load_balancer_id)):
                self._nova.delete_server_group(one["id"])

    def attach(self, amphora_id: str, port: Port) -> None:
        """Attach a port to the amphora's server."""
        wanted = f"attach port {port.id} to amphora {amphora_id}"
        with translated_for_compute(wanted):
            server = servers.choose(self._find(amphora_id))
            if server is None:
                raise ComputeError(wanted, "its server does not exist")
            if servers.state_of(server) is not MachineState.RUNNING:
                raise ComputeError(wanted, servers.reason_of(server))
            interface: Json | None
            try:
                interface = self._nova.attach_port(server["id"], port.id)
            except ApiError as error:
                # Nova answers 409 if the port is already attached, to this server or to another. So the backend looks
                # for the port among the interfaces of this server.
                interface = self._nova.interface(server["id"], port.id) if error.status == 409 else None
                if interface is None:
                    raise
            self._await_active(server["id"], port, interface, amphora_id)

    def detach(self, amphora_id: str, port: Port) -> None:
        """Detach a port; no error if it is not attached. The port stays."""
        wanted = f"detach port {port.id} from amphora {amphora_id}"
        with translated_for_compute(wanted):
            server = servers.choose(self._find(amphora_id))
            if server is None or not self._nova.detach_port(server["id"], port.id):
                return
            pauses = _Pauses(self._options.deletion_timeout, wanted)
            while self._nova.interface(server["id"], port.id) is not None:
                if not pauses.wait():
                    raise ComputeError(wanted, "Nova has not detached the port yet")

    def destroy(self, amphora_id: str) -> None:
        """Delete all servers of the amphora, wait for the end of the deletion, then delete its ports."""
        wanted = f"destroy amphora {amphora_id}"
        with translated_for_compute(wanted):
            self._remove(amphora_id, self._find(amphora_id), wanted)
            for port in self._network.management_ports(amphora_id):
                self._network.delete_port(port.id)

    def _find(self, amphora_id: str) -> list[Json]:
        tags = self._tag, servers.amphora_tag(amphora_id)
        return [one for one in self._nova.find_servers(*tags) if servers.has_tags(one, tags)]

    def _create(self, request: BootRequest, failed: Sequence[Json], wanted: str) -> Machine:
        options = self._options
        # The backend looks up flavor and image before the creation of ports. Otherwise, a missing flavor or image would
        # leave unused ports.
        flavor_id = self._profiles.flavor_id(request.flavor or options.flavor)
        image_id = self._profiles.image_id(request.image_tag or options.image_tag)
        ports = [
            self._network.ensure_port(management_port(request.amphora_id, network_id, ()))
            for network_id in request.management_networks or options.management_networks
        ]
        address = servers.management_address(ports[0])
        if address is None:
            remedy = "Give the management network a subnet."
            raise ComputeError(wanted, f"port {ports[0].id} has no address", remedy, final=True)
        group_id, different_hosts = self._placement(request, failed)
        booted_for = request.load_balancer_id
        new = NewServer(
            name=f"{options.name_prefix}-{request.amphora_id}",
            tags=(self._tag, servers.amphora_tag(request.amphora_id)),
            metadata=servers.server_metadata(self._deployment_id, request.amphora_id, booted_for, image_id, address),
            flavor_id=flavor_id,
            image_id=image_id,
            port_ids=tuple(one.id for one in ports),
            user_data=build_user_data(agent_files(request, address), wanted),
            key_name=options.key_name,
            volume=self._volume(),
            group_id=group_id,
            different_hosts=different_hosts,
        )
        zones = servers.zone_order(request.zones or self.default_zones, request.partners, failed)
        server_id, zone = self._create_in_zone(new, zones)
        return Machine(
            compute_id=server_id,
            state=MachineState.BUILDING,
            management_address=address,
            image=image_id,
            # The partner may boot before Nova reports the zone of this server. So the location contains the requested
            # zone.
            location=Location(zone=zone),
        )

    def _create_in_zone(self, new: NewServer, zones: Sequence[str | None]) -> tuple[str, str | None]:
        """Create a server in the first zone that Nova accepts; return its id and the zone."""
        *others, last = zones
        for zone in others:
            try:
                return str(self._nova.create_server(servers.server_body(new, zone))["id"]), zone
            except ApiError as error:
                if error.status != 400 or "availability zone" not in error.message.lower():
                    raise
                LOG.warning(
                    "Nova refuses zone %s for server %s, so the compute backend tries the next zone: %s",
                    zone,
                    new.name,
                    error.message,
                )
        return str(self._nova.create_server(servers.server_body(new, last))["id"]), last

    def _placement(self, request: BootRequest, failed: Sequence[Json]) -> tuple[str | None, tuple[str, ...]]:
        """Return the server group of a new server, and the servers whose hypervisors it must not use."""
        if request.placement is Placement.NONE:
            return None, ()
        group_id, members = None, frozenset[str]()
        if self._options.server_groups and not request.spare:
            group = self._ensure_group(request.load_balancer_id, request.placement)
            group_id, members = group["id"], frozenset(group["members"])
        required = request.placement is Placement.REQUIRED and not request.spare
        if not required and any(map(servers.lacked_host, failed)):
            # With the hint `different_host`, Nova boots no server if only the hypervisors of partners are free. An
            # earlier attempt failed for this reason, so this attempt omits the hint.
            return group_id, ()
        # A partner that was a warm spare is not a member of the server group. So a hint keeps the new server off the
        # hypervisor of that partner.
        return group_id, tuple(one.compute_id for one in request.partners if one.compute_id not in members)

    def _ensure_group(self, load_balancer_id: str, placement: Placement) -> Json:
        name, policy = self._group_name(load_balancer_id), servers.group_policy(placement)
        found = self._nova.server_groups(name)
        # An interrupted request may leave several groups with this name. All processes use the one with the smallest
        # id.
        return min(found, key=lambda one: one["id"]) if found else self._nova.create_server_group(name, str(policy))

    def _group_name(self, load_balancer_id: str) -> str:
        return f"{self._options.name_prefix}-{self._deployment_id}-{load_balancer_id}"

    def _volume(self) -> BootVolume | None:
        size = self._options.boot_volume_size
        return BootVolume(size=size, type=self._options.boot_volume_type) if size else None

    def _delete_duplicates(self, amphora_id: str, kept: Json, found: Sequence[Json]) -> None:
        for one in found:
            if one["id"] != kept["id"]:
                LOG.warning(
                    "Nova has several servers for amphora %s, so the compute backend keeps server %s and "
                    "deletes server %s",
                    amphora_id,
                    kept["id"],
                    one["id"],
                )
                self._nova.delete_server(one["id"])

    def _remove(self, amphora_id: str, found: Sequence[Json], wanted: str) -> None:
        """Delete servers, and wait until Nova has removed all servers of the amphora."""
        pauses = _Pauses(self._options.deletion_timeout, wanted)
        begun: set[str] = set()
        left = list(found)
        while left:
            for one in left:
                if one["id"] not in begun:
                    begun.add(one["id"])
                    self._nova.delete_server(one["id"])
            left = self._find(amphora_id)
            if left and not pauses.wait():
                states = ", ".join(f"{one['id']} ({one['status']})" for one in left)
                raise ComputeError(wanted, f"its server is still being deleted: {states}")

    def _await_active(self, server_id: str, port: Port, interface: Json | None, amphora_id: str) -> None:
        """Wait a short time for the port, so that the first packets of the amphora are not lost."""
        pauses = _Pauses(_ACTIVE_SECONDS, "attach a port")
        while interface is not None and interface["port_state"] != "ACTIVE":
            if not pauses.wait():
                # Some mechanism drivers of Neutron never report an active port, for example for SR-IOV. So the wait
                # ends without an error.
                LOG.warning(
                    "port %s of amphora %s still has state %s instead of ACTIVE, but the compute backend stops "
                    "waiting and continues",
                    port.id,
                    amphora_id,
                    interface["port_state"],
                )
                return
            interface = self._nova.interface(server_id, port.id)


class _Pauses:
    """Pauses between queries, for at most `seconds` and the deadline of the operation."""

    def __init__(self, seconds: float, wanted: str) -> None:
        self._deadline = part_of_current(seconds, wanted)
        self._pause = _FIRST_PAUSE

    def wait(self) -> bool:
        """Pause; return False without a pause if no time is left."""
        left = self._deadline.left()
        if left <= 0:
            return False
        time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        return True


def _require(options: cfg.ConfigOpts, deployment_id: str | None) -> None:
    if not deployment_id:
        raise ConfigurationError(
            _USE,
            "[amp_openstack] deployment_id is not set, so the backend cannot recognize its servers",
            "Choose a name that no other deployment of this cloud has, for example the output of uuidgen, and set it "
            "in the configuration of all processes.",
        )
    if not options.image_owner:
        raise ConfigurationError(
            _USE,
            "[amp_compute_nova] image_owner is not set, so amphorae could boot an image that another project shares "
            "with the same tag (CVE-2019-3895)",
            "Set it to the id of the project that owns the images: openstack image show IMAGE -c owner.",
        )
    if not options.management_networks:
        raise ConfigurationError(
            _USE,
            "[amp_compute_nova] management_networks is not set, so the controllers could not reach the agents",
            "Set it to the id of a network that the controllers reach: openstack network list.",
        )
