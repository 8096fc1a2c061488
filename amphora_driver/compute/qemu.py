# SPDX-License-Identifier: Apache-2.0
"""The compute backend that runs amphorae as QEMU virtual machines of this machine.

Invariant: the directory of an amphora holds its complete state (`state_dirs`): the disk overlay, the config drive, the
console output and the process record. Every step continues from the state that an earlier, interrupted attempt left. A
machine survives the process that booted it. Its interfaces are on the same switch as those of `netns` amphorae.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from amphora_driver.compute import kvm_probe
from amphora_driver.compute.config_drive import build_config_drive
from amphora_driver.compute.images import BASE, Images, link_image_files
from amphora_driver.compute.interface import BootRequest, Machine, MachineState
from amphora_driver.compute.qemu_command import (
    CONSOLE,
    DISK,
    DRIVE,
    PID,
    Hardware,
    bounded_console_command,
    build_command,
    device_id,
    interface_options,
    tap_options,
)
from amphora_driver.compute.qmp import Monitor, open_monitor
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
from amphora_driver.model.network import Subnet
from amphora_driver.network import taps
from amphora_driver.network.bridges import Switch
from amphora_driver.network.interface import management_port

if TYPE_CHECKING:
    from oslo_config import cfg

    from amphora_driver.model.network import Port
    from amphora_driver.network.ip_allocation import Segment
    from amphora_driver.network.local import LocalNetwork

LOG = logging.getLogger(__name__)
_PROCESS_FILE, _HARDWARE_FILE = "process.json", "hardware.json"
# Time-outs in seconds: end of a process, creation of an overlay, removal of an interface by the guest.
_KILL_SECONDS, _OVERLAY_SECONDS, _RELEASE_SECONDS = 10.0, 60.0, 10.0


class QemuCompute:
    """Runs amphorae as virtual machines from images.

    Args:
        conf: the options of the driver.
        network: the network backend. This class creates and deletes the management ports.
    """

    supports: ClassVar[frozenset[str]] = frozenset({"amp_image_tag"})
    wiring: ClassVar[str] = "bridge"

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        self._options = conf.amp_compute_qemu
        self._network = network
        self._state_dirs = StateDirs(Path(self._options.directory).absolute(), self._options.prefix)
        self._images = Images(Path(self._options.image_directory).absolute())
        self._management: str = self._options.management_network
        self._switch_name: str = conf.amp_network_local.switch
        self._switch = Switch(self._switch_name, self._management)

    # --- the backend's interface ---------------------------------------------------------------------------

    def boot(self, request: BootRequest) -> Machine:
        """Boot a machine for the amphora, or return the existing one. A machine that ended gets a new disk."""
        wanted = f"boot amphora {request.amphora_id}"
        with self._state_dirs.locked(request.amphora_id, make=True) as folder, compute_errors(wanted):
            machine = self._machine(request.amphora_id)
            if machine is not None and machine.state is MachineState.RUNNING:
                return machine
            self._state_dirs.mark_owner(folder)
            self._stop(folder, wanted)
            image = self._images.find(request.image_tag or self._options.image_tag)
            digest = self._images.digest(image)
            port = self._management_port(request.amphora_id)
            address = port.addresses[0].address
            name = f"amphora-{request.amphora_id}"
            drive = build_config_drive(
                request.amphora_id, name, agent_files(request, address), port, self._subnets(port)
            )
            write_private(folder / DRIVE, drive)
            link_image_files(image, folder)
            _make_overlay(folder, wanted)
            hardware = self._hardware(name, image.arguments, initrd=image.initrd is not None)
            write_image_name(folder, digest)
            write_private(folder / _HARDWARE_FILE, msgspec.json.encode(hardware))
            self._start(request.amphora_id, folder, hardware, (port,))
            return self._running(request.amphora_id, address, digest)

    def image(self, tag: str | None) -> str | None:
        """The tag and the digest of the image with this tag; None if it does not exist."""
        with compute_errors("read the images"):
            try:
                return self._images.digest(self._images.find(tag or self._options.image_tag))
            except ComputeError as error:
                LOG.warning("no digest for the current image: %s", error)
                return None

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
            process = self._process(folder) if folder.is_dir() else None
            if process is None or not process.alive():
                raise ComputeError(wanted, "the amphora does not run")
            self._connect(amphora_id, port)
            with open_monitor(folder, wanted) as monitor:
                _add_interface(monitor, port, self._switch_name)

    def detach(self, amphora_id: str, port: Port) -> None:
        """Remove the interface of a port; no error if it does not exist."""
        wanted = f"detach port {port.id} from amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            process = self._process(folder) if folder.is_dir() else None
            if process is not None and process.alive():
                with open_monitor(folder, wanted) as monitor:
                    _remove_interface(monitor, port)
            self._switch.disconnect(port.id)

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove everything that `boot` created; no error if nothing exists."""
        wanted = f"destroy amphora {amphora_id}"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            self._stop_and_disconnect(amphora_id, folder, wanted)
            for port in self._network.ports(amphora_id):
                if port.network_id == self._management:
                    self._network.delete_port(port.id)
            if folder.is_dir():
                remove_directory(folder)

    # --- for the sandbox and tests -------------------------------------------------------------------------

    def power_off(self, amphora_id: str) -> None:
        """Kill the machine without a shutdown; its disk and ports stay for `power_on`."""
        wanted = f"power amphora {amphora_id} off"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            self._stop_and_disconnect(amphora_id, folder, wanted)

    def power_on(self, amphora_id: str) -> bool:
        """Start an existing machine with its ports; False if it runs, or its boot is incomplete."""
        wanted = f"power amphora {amphora_id} on"
        with self._state_dirs.locked(amphora_id) as folder, compute_errors(wanted):
            machine = self._machine(amphora_id)
            # Without the hardware file, the boot is incomplete: the controller repeats it.
            if machine is None or machine.state is MachineState.RUNNING or not (folder / _HARDWARE_FILE).exists():
                return False
            hardware = msgspec.json.decode((folder / _HARDWARE_FILE).read_bytes(), type=Hardware)
            first = self._management_port(amphora_id)
            others = [port for port in self._network.ports(amphora_id) if port.id != first.id]
            self._start(amphora_id, folder, hardware, (first, *others))
            return True

    def booted(self) -> list[str]:
        """The ids of all amphorae that have a directory, of every deployment, running or not."""
        return self._state_dirs.all_amphorae()

    # --- steps ---------------------------------------------------------------------------------------------

    def _machine(self, amphora_id: str) -> Machine | None:
        folder = self._state_dirs.path(amphora_id)
        if not folder.is_dir():
            return None
        process = self._process(folder)
        if process is None:
            reason = "its boot was interrupted; boot it again"
            return Machine(compute_id=amphora_id, state=MachineState.BUILDING, reason=reason)
        address = self._address(amphora_id)
        if process.alive() and address is not None:
            return self._running(amphora_id, address, read_image_name(folder))
        reason = f"it ended: {console_tail(folder / CONSOLE)}"
        return Machine(compute_id=amphora_id, state=MachineState.FAILED, management_address=address, reason=reason)

    @staticmethod
    def _running(amphora_id: str, address: str, image: str | None) -> Machine:
        return Machine(compute_id=amphora_id, state=MachineState.RUNNING, management_address=address, image=image)

    def _address(self, amphora_id: str) -> str | None:
        ports = [port for port in self._network.ports(amphora_id) if port.network_id == self._management]
        return ports[0].addresses[0].address if ports and ports[0].addresses else None

    def _management_port(self, amphora_id: str) -> Port:
        subnets = self._network.subnets(self._management)
        return self._network.ensure_port(
            management_port(amphora_id, self._management, (subnet.id for subnet in subnets))
        )

    def _subnets(self, port: Port) -> list[Subnet]:
        return [self._network.subnet(fixed.subnet_id) for fixed in port.addresses]

    def _hardware(self, name: str, arguments: str | None, *, initrd: bool) -> Hardware:
        options = self._options
        chosen = options.accelerator
        accelerated = chosen == "kvm" or (chosen == "auto" and kvm_probe.usable(options.program))
        return Hardware(
            program=options.program,
            name=name,
            machine=options.machine,
            accelerated=accelerated,
            processors=options.processors,
            memory=options.memory,
            kernel_arguments=arguments,
            initrd=initrd,
            # QEMU refuses to change to its current user.
            user=None if _uid_of(options.user, "start a machine") == os.geteuid() else options.user,
            runs_with=kvm_probe.supports_run_with_user(options.program),
        )

    def _start(self, amphora_id: str, folder: Path, hardware: Hardware, ports: tuple[Port, ...]) -> None:
        for port in ports:
            self._connect(amphora_id, port)
        self._spawn(folder, build_command(hardware, folder, ports))

    def _spawn(self, folder: Path, argv: list[str]) -> None:
        # Discard the console output of the previous boot.
        write_private(folder / CONSOLE, b"")
        inside = ("nsenter", f"--net={namespaces.path(self._switch_name)}", f"--wd={folder}", "--")
        environment = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        process = spawn([*inside, *bounded_console_command(argv)], {**environment, "LANG": "C.UTF-8"}, folder / CONSOLE)
        write_private(folder / _PROCESS_FILE, msgspec.json.encode(process))

    def _connect(self, amphora_id: str, port: Port) -> None:
        wanted = f"connect port {port.id}"
        taps.ensure_tap(self._switch_name, port, self._segment(port.network_id, wanted), amphora_id)

    def _segment(self, network_id: str, wanted: str) -> Segment:
        for segment in self._network.networks():
            if segment.id == network_id:
                return segment
        remedy = "See [amp_compute_qemu] management_network."
        raise ComputeError(wanted, f"network {network_id} does not exist", remedy, final=True)

    def _process(self, folder: Path) -> Process | None:
        """The QEMU process, from its record, or by its arguments if there is no record."""
        try:
            return msgspec.json.decode((folder / _PROCESS_FILE).read_bytes(), type=Process)
        except FileNotFoundError:
            found = find_by_last_argument(str(folder / PID))
            return found[0] if found else None

    def _stop(self, folder: Path, wanted: str) -> None:
        process = self._process(folder)
        if process is not None and not signal_and_wait([process], signal.SIGKILL, limit_wait(_KILL_SECONDS)):
            raise ComputeError(wanted, "the QEMU process does not end after SIGKILL")
        (folder / _PROCESS_FILE).unlink(missing_ok=True)

    def _stop_and_disconnect(self, amphora_id: str, folder: Path, wanted: str) -> None:
        self._stop(folder, wanted)
        self._switch.disconnect_owner(amphora_id)


def _uid_of(user: str, wanted: str) -> int:
    """The uid of a user.

    Raises:
        ComputeError: the user does not exist.
    """
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        remedy = "See [amp_compute_qemu] user."
        raise ComputeError(wanted, f"this machine has no user {user}", remedy, final=True) from None


def _add_interface(monitor: Monitor, port: Port, switch: str) -> None:
    """Add the interface of a port; nothing changes if it exists.

    An interrupted attempt may have left a netdev or a descriptor with the same name.
    """
    if device_id(port) in monitor.device_ids():
        return
    name = tap_options(port)["id"]
    monitor.try_execute("netdev_del", id=name)
    monitor.try_execute("closefd", fdname=name)
    with taps.open_tap(switch, port) as descriptor:
        monitor.send_descriptor(descriptor, name)
    monitor.execute("netdev_add", type="tap", id=name, fd=name)
    monitor.execute("device_add", **interface_options(port))


def _remove_interface(monitor: Monitor, port: Port) -> None:
    """Remove the interface of a port. If the guest does not release it, remove its network backend only."""
    if device_id(port) in monitor.device_ids():
        # QEMU refuses only while an earlier request waits for the guest.
        monitor.try_execute("device_del", id=device_id(port))
        if not monitor.wait_until_removed(device_id(port), _RELEASE_SECONDS):
            LOG.warning(
                "guest has not released the interface of port %s within %g s; removing its network backend",
                port.id,
                _RELEASE_SECONDS,
            )
    monitor.try_execute("netdev_del", id=tap_options(port)["id"])


def _make_overlay(folder: Path, wanted: str) -> None:
    """Create an empty disk overlay on the image."""
    temporary = f".{DISK}.new"
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", BASE, temporary]
    try:
        subprocess.run(
            argv,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=limit_wait(_OVERLAY_SECONDS),
            check=True,
            umask=0o077,
        )
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise ComputeError(wanted, f"qemu-img: {str(reason).strip()}") from error
    (folder / temporary).replace(folder / DISK)
