# SPDX-License-Identifier: Apache-2.0
"""The compute backend that runs amphorae in network namespaces of this machine.

Invariant: the directory of an amphora holds its complete state (`state_dirs`). Every step continues from the state that
an earlier, interrupted attempt left. An amphora survives the process that booted it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from amphora_driver.compute.agent_source import AgentSource
from amphora_driver.compute.interface import BootRequest, Machine, MachineState
from amphora_driver.compute.state_dirs import (
    StateDirs,
    agent_files,
    compute_errors,
    console_tail,
    read_image_name,
    remove_directory,
    write_image_name,
    write_private,
)
from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import Process, find_by_last_argument, signal_and_wait, spawn
from amphora_driver.network import bridges
from amphora_driver.network.bridges import Switch
from amphora_driver.network.interface import management_port

if TYPE_CHECKING:
    from oslo_config import cfg

    from amphora_driver.model.network import Port
    from amphora_driver.network.local import LocalNetwork

MANAGEMENT_INTERFACE = "eth0"
INNER_NAMESPACE = "run/netns/amphora-haproxy"
_KILL_SECONDS = 10.0


class NetnsCompute:
    """Runs amphorae in namespaces of this machine.

    Args:
        conf: the options of the driver.
        network: the network backend. This class creates and deletes the management ports.
    """

    # Sizes and zones have no effect on one machine. The backend accepts them so that flavors can be tested.
    supports: ClassVar[frozenset[str]] = frozenset({"compute_flavor", "compute_zone"})
    wiring: ClassVar[str] = "bridge"

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        options = conf.amp_compute_netns
        self._network = network
        self._prefix: str = options.prefix
        self._state_dirs = StateDirs(Path(options.directory).absolute(), self._prefix)
        self._python: str = options.agent_python
        self._management: str = options.management_network
        self._agent_source = AgentSource(self._python)
        self._switch = Switch(conf.amp_network_local.switch, options.management_network)

    # --- the backend's interface ---------------------------------------------------------------------------

    def boot(self, request: BootRequest) -> Machine:
        """Boot a machine for the amphora, or return the existing one."""
        with (
            self._state_dirs.locked(request.amphora_id, make=True) as folder,
            compute_errors(f"boot amphora {request.amphora_id}"),
        ):
            machine = self._machine(request.amphora_id)
            if machine is not None and machine.state is MachineState.RUNNING:
                return machine
            self._state_dirs.mark_owner(folder)
            address = self._prepare_network(request.amphora_id)
            _write_files(folder, request, address)
            image = self.image(request.image_tag)
            write_image_name(folder, image)
            self._start(request.amphora_id, folder)
            return Machine(
                compute_id=self.namespace(request.amphora_id),
                state=MachineState.RUNNING,
                management_address=address,
                image=image,
            )

    def image(self, tag: str | None) -> str | None:  # noqa: ARG002 - this backend has no images
        """The digest of the agent code that a machine runs if it boots now."""
        with compute_errors("read the agent's code"):
            return self._agent_source.digest()

    def machines(self) -> frozenset[str]:
        """The ids of all amphorae of this deployment that have a directory."""
        with compute_errors("list amphorae"):
            return self._state_dirs.own_amphorae()

    def get(self, amphora_id: str) -> Machine | None:
        """The amphora's machine; None if it does not exist."""
        with compute_errors(f"look up amphora {amphora_id}"):
            return self._machine(amphora_id)

    def attach(self, amphora_id: str, port: Port) -> None:
        """Add an interface with the port's MAC address on the port's network to the machine."""
        wanted = f"attach port {port.id} to amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            process = self._process(amphora_id) if folder.is_dir() else None
            if process is None or not process.alive():
                raise ComputeError(wanted, "the amphora does not run")
            if not self._has_interface(amphora_id, process, port.mac):
                self._switch.disconnect(port.id)
            self._connect(amphora_id, port)

    def detach(self, amphora_id: str, port: Port) -> None:
        """Remove the interface of a port; no error if it does not exist."""
        with self._state_dirs.locked(amphora_id), compute_errors(f"detach port {port.id} from amphora {amphora_id}"):
            self._switch.disconnect(port.id)

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove everything that `boot` created; no error if nothing exists."""
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(f"destroy amphora {amphora_id}"):
            self._remove_machine(amphora_id)
            for port in self._network.ports(amphora_id):
                if port.network_id == self._management:
                    self._network.delete_port(port.id)
            if folder.is_dir():
                remove_directory(folder)

    # --- for the sandbox and tests -------------------------------------------------------------------------

    def power_off(self, amphora_id: str) -> None:
        """Stop the machine and remove its namespaces; its files and ports stay for `power_on`."""
        with self._state_dirs.locked(amphora_id), compute_errors(f"power amphora {amphora_id} off"):
            self._remove_machine(amphora_id)

    def power_on(self, amphora_id: str) -> bool:
        """Start an existing machine with its ports; False if it runs, or its boot is incomplete."""
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(f"power amphora {amphora_id} on"):
            machine = self._machine(amphora_id)
            # Without the specification, the boot is incomplete: the controller repeats it.
            if machine is None or machine.state is MachineState.RUNNING or not (folder / "spec.json").exists():
                return False
            self._prepare_network(amphora_id)
            self._start(amphora_id, folder)
            for port in self._network.ports(amphora_id):
                if port.network_id != self._management:
                    self._switch.disconnect(port.id)
                    self._connect(amphora_id, port)
            return True

    def namespace(self, amphora_id: str) -> str:
        """The name of the amphora's management namespace."""
        return f"{self._prefix}-{amphora_id[:13]}"

    def booted(self) -> list[str]:
        """The ids of all amphorae that have a directory, of every deployment, running or not."""
        return self._state_dirs.all_amphorae()

    # --- steps ---------------------------------------------------------------------------------------------

    def _machine(self, amphora_id: str) -> Machine | None:
        folder = self._state_dirs.path(amphora_id)
        if not folder.is_dir():
            return None
        name = self.namespace(amphora_id)
        process = self._process(amphora_id)
        if process is None:
            reason = "its boot was interrupted; boot it again"
            return Machine(compute_id=name, state=MachineState.BUILDING, reason=reason)
        address = self._address(amphora_id)
        if process.alive() and address is not None:
            image = read_image_name(folder)
            return Machine(compute_id=name, state=MachineState.RUNNING, management_address=address, image=image)
        reason = f"it ended: {console_tail(folder / 'console.log')}"
        return Machine(compute_id=name, state=MachineState.FAILED, management_address=address, reason=reason)

    def _address(self, amphora_id: str) -> str | None:
        ports = [port for port in self._network.ports(amphora_id) if port.network_id == self._management]
        return ports[0].addresses[0].address if ports and ports[0].addresses else None

    def _prepare_network(self, amphora_id: str) -> str:
        subnets = self._network.subnets(self._management)
        segment = self._segment(self._management, f"boot amphora {amphora_id}")
        port = self._network.ensure_port(
            management_port(amphora_id, self._management, (subnet.id for subnet in subnets))
        )
        place = self._namespace_path(amphora_id)
        namespaces.ensure(self.namespace(amphora_id))
        if not bridges.has_mac(place, port.mac):
            self._switch.disconnect(port.id)
        self._switch.connect(port, segment, amphora_id, place, MANAGEMENT_INTERFACE)
        bridges.configure_interface(place, MANAGEMENT_INTERFACE, port, subnets)
        return port.addresses[0].address

    def _segment(self, network_id: str, wanted: str) -> Any:
        for segment in self._network.networks():
            if segment.id == network_id:
                return segment
        remedy = "See [amp_compute_netns] management_network."
        raise ComputeError(wanted, f"network {network_id} does not exist", remedy, final=True)

    def _start(self, amphora_id: str, folder: Path) -> None:
        spec = folder / "spec.json"
        parts = {
            "hostname": f"amphora-{amphora_id}",
            "etc": str(folder / "etc"),
            "var": str(folder / "var"),
            "python": self._python,
        }
        write_private(spec, msgspec.json.encode(parts))
        argv = [
            *("nsenter", f"--net={self._namespace_path(amphora_id)}", "--"),
            *("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--uts", "--ipc"),
            *("--propagation", "private", "--mount-proc", "--wd=/", "--"),
            *(self._python, "-m", "amphora_agent.services.supervisor", str(spec)),
        ]
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        process = spawn(argv, {**environment, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}, folder / "console.log")
        write_private(folder / "process.json", msgspec.json.encode(process))

    def _process(self, amphora_id: str) -> Process | None:
        """The outermost process, from its record, or by its arguments if there is no record."""
        folder = self._state_dirs.path(amphora_id)
        try:
            return msgspec.json.decode((folder / "process.json").read_bytes(), type=Process)
        except FileNotFoundError:
            # The outermost process is the oldest. A boot that is in progress may not have written the record yet.
            found = sorted(find_by_last_argument(str(folder / "spec.json")), key=lambda process: process.started)
            return found[0] if found else None

    def _stop(self, amphora_id: str) -> None:
        process = self._process(amphora_id)
        # If the first process of a PID namespace ends, the kernel ends all others and waits for them.
        known = [] if process is None else [*process.children(), process]
        # An outermost process that has just started may have no child yet, or a child without the parent-death signal.
        if not signal_and_wait(known, signal.SIGKILL, limit_wait(_KILL_SECONDS)) or not signal_and_wait(
            namespaces.processes(self.namespace(amphora_id)), signal.SIGKILL, limit_wait(_KILL_SECONDS)
        ):
            raise ComputeError(f"stop amphora {amphora_id}", "a process of the amphora does not end after SIGKILL")
        (self._state_dirs.path(amphora_id) / "process.json").unlink(missing_ok=True)

    def _remove_machine(self, amphora_id: str) -> None:
        self._stop(amphora_id)
        self._switch.disconnect_owner(amphora_id)
        namespaces.remove(self.namespace(amphora_id))

    def _connect(self, amphora_id: str, port: Port) -> None:
        """Connect a port.

        An existing veth pair is also connected: a crash may have left a pair that is not on its bridge.
        The caller removes a pair without its far end first: the kernel needs some milliseconds to remove the pair of
        an ended amphora.
        """
        segment = self._segment(port.network_id, f"connect port {port.id}")
        self._switch.connect(port, segment, amphora_id, self._namespace_path(amphora_id), None)

    def _has_interface(self, amphora_id: str, process: Process, mac: str) -> bool:
        """Whether the amphora has the interface.

        The agent moves it from the outer namespace to the inner one, never back: the outer one is checked first.
        """
        if bridges.has_mac(self._namespace_path(amphora_id), mac):
            return True
        return any(bridges.has_mac(f"/proc/{child.pid}/root/{INNER_NAMESPACE}", mac) for child in process.children())

    def _namespace_path(self, amphora_id: str) -> Path:
        return namespaces.path(self.namespace(amphora_id))


def _write_files(folder: Path, request: BootRequest, address: str) -> None:
    etc = folder / "etc"
    for place in (etc, folder / "var"):
        place.mkdir(mode=0o700, exist_ok=True)
    for name, content in agent_files(request, address).items():
        write_private(etc / name, content)
