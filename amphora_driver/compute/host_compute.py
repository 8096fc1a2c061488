# SPDX-License-Identifier: Apache-2.0
"""The common part of the compute backends that run amphorae on this machine.

Invariant: the directory of an amphora holds its complete state (`state_dirs`). Every step continues from the state that
an earlier, interrupted attempt left. An amphora survives the process that booted it. The backends create and delete the
management ports.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
from oslo_config import cfg

from amphora_driver.compute.interface import BootPartner, BootRequest, Location, Machine, MachineState
from amphora_driver.compute.state_dirs import StateDirs, compute_errors, console_tail, read_image_name, remove_directory
from amphora_driver.errors import ComputeError
from amphora_driver.host.detached_process import Process, find_by_last_argument
from amphora_driver.model.network import Port
from amphora_driver.network.bridges import Switch
from amphora_driver.network.interface import management_port
from amphora_driver.network.ip_allocation import Segment
from amphora_driver.network.local import LocalNetwork

CONSOLE_FILE, PROCESS_FILE = "console.log", "process.json"
KILL_SECONDS = 10.0


class HostCompute(ABC):
    """Runs amphorae as processes of this machine.

    Attributes:
        group: the option group of the backend.
        boot_file: the last file that a boot writes; a boot without this file is incomplete.
        last_argument: the file in the amphora's directory that is the last argument of its process.
    """

    wiring: ClassVar[str] = "bridge"
    plugs_while_booting: ClassVar[bool] = True
    default_zones: tuple[str, ...] = ()
    listing_interval: float = 0.0
    group: ClassVar[str]
    boot_file: ClassVar[str]
    last_argument: ClassVar[str]

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        self._options = conf[self.group]
        self._network = network
        self._state_dirs = StateDirs(Path(self._options.directory).absolute(), self._options.prefix)
        self._management: str = self._options.management_network
        self._switch_name: str = conf.amp_network_local.switch
        self._switch = Switch(self._switch_name, self._management)

    def boot(self, request: BootRequest) -> Machine:
        wanted = f"boot amphora {request.amphora_id}"
        with self._state_dirs.locked(request.amphora_id, make=True) as folder, compute_errors(wanted):
            machine = self._machine(request.amphora_id)
            if machine is not None and machine.state is MachineState.RUNNING:
                return machine
            self._state_dirs.mark_owner(folder)
            return self._boot(request, folder, wanted)

    def machines(self) -> frozenset[str]:
        with compute_errors("list amphorae"):
            return self._state_dirs.own_amphorae()

    def get(self, amphora_id: str) -> Machine | None:
        with compute_errors(f"look up amphora {amphora_id}"):
            return self._machine(amphora_id)

    def validate_profile(self, metadata: Mapping[str, object]) -> None:  # noqa: B027 - the common implementation
        """Accept all values: the schema has checked them, and this machine has no list of flavors or zones."""

    def can_separate(self, partners: Sequence[BootPartner], zones: Sequence[str]) -> bool:  # noqa: ARG002
        # All machines run on this host. So no boot needs to wait for the location of its partner.
        return True

    def locations(self) -> dict[str, Location]:
        # All machines run on this host, so no location can separate the amphorae of a pair. The controller accepts an
        # empty location as unknown.
        return dict.fromkeys(self.machines(), Location())

    def host_names(self, name: str) -> frozenset[str]:
        return frozenset({name})

    def release_load_balancer(self, load_balancer_id: str) -> None:  # noqa: B027 - the common implementation
        """Do nothing: all objects of this backend belong to one machine."""

    def attach(self, amphora_id: str, port: Port) -> None:
        wanted = f"attach port {port.id} to amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            process = self._process(amphora_id) if folder.is_dir() else None
            if process is None or not process.alive():
                raise ComputeError(wanted, "the amphora does not run")
            self._attach(amphora_id, port, process, wanted)

    def detach(self, amphora_id: str, port: Port) -> None:
        wanted = f"detach port {port.id} from amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id), compute_errors(wanted):
            self._detach(amphora_id, port, wanted)
            self._switch.disconnect(port.id)

    def destroy(self, amphora_id: str) -> None:
        wanted = f"destroy amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            self._remove_machine(amphora_id, wanted)
            for port in self._network.ports(amphora_id):
                if port.network_id == self._management:
                    self._network.delete_port(port.id)
            if folder.is_dir():
                remove_directory(folder)

    def power_off(self, amphora_id: str) -> None:
        """Kill the machine without a shutdown; its files and ports stay for `power_on`."""
        wanted = f"power amphora {amphora_id} off"
        with self._state_dirs.locked(amphora_id), compute_errors(wanted):
            self._remove_machine(amphora_id, wanted)

    def power_on(self, amphora_id: str) -> bool:
        """Start an existing machine with its ports; return False if it runs or its boot is incomplete."""
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(f"power amphora {amphora_id} on"):
            machine = self._machine(amphora_id)
            # A boot writes the boot file last. A machine without the file was booted incompletely, and the controller
            # repeats the boot.
            if machine is None or machine.state is MachineState.RUNNING or not (folder / self.boot_file).exists():
                return False
            self._power_on(amphora_id, folder)
            return True

    def booted(self) -> list[str]:
        return self._state_dirs.all_amphorae()

    @abstractmethod
    def _boot(self, request: BootRequest, folder: Path, wanted: str) -> Machine: ...

    @abstractmethod
    def _power_on(self, amphora_id: str, folder: Path) -> None: ...

    @abstractmethod
    def _attach(self, amphora_id: str, port: Port, process: Process, wanted: str) -> None: ...

    def _detach(self, amphora_id: str, port: Port, wanted: str) -> None:  # noqa: B027 - optional
        """Release the interface inside the machine, before its far end is removed."""

    @abstractmethod
    def _remove_machine(self, amphora_id: str, wanted: str) -> None: ...

    def _compute_id(self, amphora_id: str) -> str:
        return amphora_id

    def _machine(self, amphora_id: str) -> Machine | None:
        folder = self._state_dirs.path(amphora_id)
        if not folder.is_dir():
            return None
        name = self._compute_id(amphora_id)
        process = self._process(amphora_id)
        if process is None:
            reason = "its boot was interrupted; boot it again"
            return Machine(compute_id=name, state=MachineState.BUILDING, reason=reason)
        ports = [port for port in self._network.ports(amphora_id) if port.network_id == self._management]
        address = ports[0].addresses[0].address if ports and ports[0].addresses else None
        if process.alive() and address is not None:
            return self._running(amphora_id, address, read_image_name(folder))
        reason = f"it ended: {console_tail(folder / CONSOLE_FILE)}"
        return Machine(compute_id=name, state=MachineState.FAILED, management_address=address, reason=reason)

    def _running(self, amphora_id: str, address: str, image: str | None) -> Machine:
        name = self._compute_id(amphora_id)
        return Machine(compute_id=name, state=MachineState.RUNNING, management_address=address, image=image)

    def _management_port(self, amphora_id: str) -> Port:
        subnets = self._network.subnets(self._management)
        return self._network.ensure_port(
            management_port(amphora_id, self._management, (subnet.id for subnet in subnets))
        )

    def _segment(self, network_id: str, wanted: str) -> Segment:
        for segment in self._network.networks():
            if segment.id == network_id:
                return segment
        remedy = f"See [{self.group}] management_network."
        raise ComputeError(wanted, f"network {network_id} does not exist", remedy, final=True)

    def _process(self, amphora_id: str) -> Process | None:
        folder = self._state_dirs.path(amphora_id)
        try:
            return msgspec.json.decode((folder / PROCESS_FILE).read_bytes(), type=Process)
        except FileNotFoundError:
            # A boot in progress may not have written the file with the process id yet. Then the backend takes the
            # oldest process with this last argument, which started the others.
            found = find_by_last_argument(str(folder / self.last_argument))
            return min(found, key=lambda process: process.started, default=None)
