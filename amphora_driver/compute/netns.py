# SPDX-License-Identifier: Apache-2.0
"""The compute backend that runs amphorae in network namespaces of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import ClassVar

import msgspec
from oslo_config import cfg

from amphora_driver.compute.agent_source import AgentSource
from amphora_driver.compute.host_compute import CONSOLE_FILE, KILL_SECONDS, PROCESS_FILE, HostCompute
from amphora_driver.compute.interface import BootRequest, Machine
from amphora_driver.compute.state_dirs import agent_files, compute_errors, write_image_name, write_private
from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import Process, signal_and_wait, spawn
from amphora_driver.model.network import Port
from amphora_driver.network import bridges
from amphora_driver.network.local import LocalNetwork

MANAGEMENT_INTERFACE = "eth0"
INNER_NAMESPACE = "run/netns/amphora-haproxy"
_SPEC_FILE = "spec.json"


class NetnsCompute(HostCompute):
    """Runs amphorae in namespaces of this machine. The backend creates and deletes the management ports."""

    # The backend accepts compute flavors and zones but ignores them, so that flavors of load balancers can be tested on
    # one host.
    supports: ClassVar[frozenset[str]] = frozenset({"compute_flavor", "compute_zone", "compute_zones"})
    group: ClassVar[str] = "amp_compute_netns"
    boot_file: ClassVar[str] = _SPEC_FILE
    last_argument: ClassVar[str] = _SPEC_FILE

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        super().__init__(conf, network)
        self._python: str = self._options.agent_python
        self._agent_source = AgentSource(self._python)

    def image(self, tag: str | None) -> str | None:  # noqa: ARG002 - this backend has no images
        """Return the digest of the agent code that a machine runs if it boots now."""
        with compute_errors("read the agent's code"):
            return self._agent_source.digest()

    def namespace(self, amphora_id: str) -> str:
        return f"{self._options.prefix}-{amphora_id[:13]}"

    def _compute_id(self, amphora_id: str) -> str:
        return self.namespace(amphora_id)

    def _boot(self, request: BootRequest, folder: Path, wanted: str) -> Machine:
        address = self._prepare_network(request.amphora_id, wanted)
        for place in (folder / "etc", folder / "var"):
            place.mkdir(mode=0o700, exist_ok=True)
        for name, content in agent_files(request, address).items():
            write_private(folder / "etc" / name, content)
        image = self.image(request.image_tag)
        write_image_name(folder, image)
        self._start(request.amphora_id, folder)
        return self._running(request.amphora_id, address, image)

    def _power_on(self, amphora_id: str, folder: Path) -> None:
        self._prepare_network(amphora_id, f"boot amphora {amphora_id}")
        self._start(amphora_id, folder)
        for port in self._network.ports(amphora_id):
            if port.network_id != self._management:
                self._switch.disconnect(port.id)
                self._connect(amphora_id, port)

    def _attach(self, amphora_id: str, port: Port, process: Process, wanted: str) -> None:  # noqa: ARG002 - interface
        if not self._has_interface(amphora_id, process, port.mac):
            self._switch.disconnect(port.id)
        self._connect(amphora_id, port)

    def _prepare_network(self, amphora_id: str, wanted: str) -> str:
        subnets = self._network.subnets(self._management)
        segment = self._segment(self._management, wanted)
        port = self._management_port(amphora_id)
        place = namespaces.path(self.namespace(amphora_id))
        namespaces.ensure(self.namespace(amphora_id))
        if not bridges.has_mac(place, port.mac):
            self._switch.disconnect(port.id)
        self._switch.connect(port, segment, amphora_id, place, MANAGEMENT_INTERFACE)
        bridges.configure_interface(place, MANAGEMENT_INTERFACE, port, subnets)
        return port.addresses[0].address

    def _start(self, amphora_id: str, folder: Path) -> None:
        spec = folder / _SPEC_FILE
        directories = {"etc": str(folder / "etc"), "var": str(folder / "var")}
        parts = {"hostname": f"amphora-{amphora_id}", **directories, "python": self._python}
        write_private(spec, msgspec.json.encode(parts))
        argv = [
            *("nsenter", f"--net={namespaces.path(self.namespace(amphora_id))}", "--"),
            *("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--uts", "--ipc"),
            *("--propagation", "private", "--mount-proc", "--wd=/", "--"),
            *(self._python, "-m", "amphora_agent.services.supervisor", str(spec)),
        ]
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        process = spawn(argv, {**environment, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}, folder / CONSOLE_FILE)
        write_private(folder / PROCESS_FILE, msgspec.json.encode(process))

    def _remove_machine(self, amphora_id: str, wanted: str) -> None:
        process = self._process(amphora_id)
        # When the first process of a PID namespace ends, the kernel ends all others. So the backend signals only the
        # recorded process and its children.
        known = [] if process is None else [*process.children(), process]
        # A child of a process that has just started may be missing from `known`. So the backend also kills all
        # processes in the network namespace.
        if not signal_and_wait(known, signal.SIGKILL, limit_wait(KILL_SECONDS)) or not signal_and_wait(
            namespaces.processes(self.namespace(amphora_id)), signal.SIGKILL, limit_wait(KILL_SECONDS)
        ):
            raise ComputeError(wanted, "a process of the amphora does not end after SIGKILL")
        (self._state_dirs.path(amphora_id) / PROCESS_FILE).unlink(missing_ok=True)
        self._switch.disconnect_owner(amphora_id)
        namespaces.remove(self.namespace(amphora_id))

    def _connect(self, amphora_id: str, port: Port) -> None:
        """Connect a port, also if its veth pair exists: a crash may have left a pair outside its bridge.

        The kernel removes the pair of an ended amphora after some milliseconds, so the caller removes a pair without a
        far end.
        """
        segment = self._segment(port.network_id, f"connect port {port.id}")
        self._switch.connect(port, segment, amphora_id, namespaces.path(self.namespace(amphora_id)), None)

    def _has_interface(self, amphora_id: str, process: Process, mac: str) -> bool:
        # The agent moves each interface from the outer to the inner network namespace. The backend searches the outer
        # namespace first, so a move during the search hides no interface.
        if bridges.has_mac(namespaces.path(self.namespace(amphora_id)), mac):
            return True
        return any(bridges.has_mac(f"/proc/{child.pid}/root/{INNER_NAMESPACE}", mac) for child in process.children())
