# SPDX-License-Identifier: Apache-2.0
"""The compute backend that runs amphorae as QEMU virtual machines of this machine.

Invariant: the directory of an amphora holds its complete state (`state_dirs`): the disk overlay, the config drive, the
console output and the process record. Every step continues from the state that an earlier, interrupted attempt left. A
virtual machine survives the process that booted it. Its interfaces are on the same switch as those of `netns` amphorae.
"""

from __future__ import annotations

import logging
import os
import pwd
import signal
import subprocess
from pathlib import Path
from typing import ClassVar

import msgspec
from oslo_config import cfg

from amphora_driver.compute import kvm_probe, qemu_command
from amphora_driver.compute.config_drive import build_config_drive
from amphora_driver.compute.host_compute import KILL_SECONDS, PROCESS_FILE, HostCompute
from amphora_driver.compute.images import BASE, Images, link_image_files
from amphora_driver.compute.interface import BootRequest, Machine
from amphora_driver.compute.qemu_command import CONSOLE, DISK, DRIVE, PID, Hardware, device_id, interface_options
from amphora_driver.compute.qmp import Monitor, open_monitor
from amphora_driver.compute.state_dirs import agent_files, compute_errors, write_image_name, write_private
from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import Process, signal_and_wait, spawn
from amphora_driver.model.network import Port
from amphora_driver.network import taps
from amphora_driver.network.local import LocalNetwork

LOG = logging.getLogger(__name__)
_HARDWARE_FILE = "hardware.json"
# Time-out in seconds of the creation of a disk overlay.
_OVERLAY_SECONDS = 60.0
# Seconds to wait until the guest releases a network interface.
_RELEASE_SECONDS = 10.0


class QemuCompute(HostCompute):
    """Runs amphorae as virtual machines from images. The backend creates and deletes the management ports."""

    supports: ClassVar[frozenset[str]] = frozenset({"amp_image_tag"})
    group: ClassVar[str] = "amp_compute_qemu"
    boot_file: ClassVar[str] = _HARDWARE_FILE
    last_argument: ClassVar[str] = PID

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        super().__init__(conf, network)
        self._images = Images(Path(self._options.image_directory).absolute())

    def image(self, tag: str | None) -> str | None:
        """Return the tag and the digest of the image with this tag; None without such an image."""
        with compute_errors("read the images"):
            try:
                return self._images.digest(self._images.find(tag or self._options.image_tag))
            except ComputeError as error:
                LOG.warning(
                    "the compute backend could not read the current image, so all machines keep their images: %s", error
                )
                return None

    def _boot(self, request: BootRequest, folder: Path, wanted: str) -> Machine:
        self._stop(request.amphora_id, wanted)
        image = self._images.find(request.image_tag or self._options.image_tag)
        digest = self._images.digest(image)
        port = self._management_port(request.amphora_id)
        address = port.addresses[0].address
        name = f"amphora-{request.amphora_id}"
        subnets = [self._network.subnet(fixed.subnet_id) for fixed in port.addresses]
        drive = build_config_drive(request.amphora_id, name, agent_files(request, address), port, subnets)
        write_private(folder / DRIVE, drive)
        link_image_files(image, folder)
        _make_overlay(folder, wanted)
        hardware = self._hardware(name, image.arguments, initrd=image.initrd is not None)
        write_image_name(folder, digest)
        write_private(folder / _HARDWARE_FILE, msgspec.json.encode(hardware))
        self._start(request.amphora_id, folder, hardware, (port,))
        return self._running(request.amphora_id, address, digest)

    def _power_on(self, amphora_id: str, folder: Path) -> None:
        hardware = msgspec.json.decode((folder / _HARDWARE_FILE).read_bytes(), type=Hardware)
        first = self._management_port(amphora_id)
        others = [port for port in self._network.ports(amphora_id) if port.id != first.id]
        self._start(amphora_id, folder, hardware, (first, *others))

    def _attach(self, amphora_id: str, port: Port, process: Process, wanted: str) -> None:  # noqa: ARG002 - interface
        self._connect(amphora_id, port)
        with open_monitor(self._state_dirs.path(amphora_id), wanted) as monitor:
            _add_interface(monitor, port, self._switch_name)

    def _detach(self, amphora_id: str, port: Port, wanted: str) -> None:
        folder = self._state_dirs.path(amphora_id)
        process = self._process(amphora_id) if folder.is_dir() else None
        if process is not None and process.alive():
            with open_monitor(folder, wanted) as monitor:
                _remove_interface(monitor, port)

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
            # QEMU refuses to change to its present user, so the option is left out in that case.
            user=None if _uid_of(options.user, "start a machine") == os.geteuid() else options.user,
            runs_with=kvm_probe.supports_run_with_user(options.program),
        )

    def _start(self, amphora_id: str, folder: Path, hardware: Hardware, ports: tuple[Port, ...]) -> None:
        for port in ports:
            self._connect(amphora_id, port)
        self._spawn(folder, qemu_command.build_command(hardware, folder, ports))

    def _spawn(self, folder: Path, argv: list[str]) -> None:
        # The console file must show the present boot only.
        write_private(folder / CONSOLE, b"")
        inside = ("nsenter", f"--net={namespaces.path(self._switch_name)}", f"--wd={folder}", "--")
        environment = {name: os.environ[name] for name in ("PATH",) if name in os.environ} | {"LANG": "C.UTF-8"}
        process = spawn([*inside, *qemu_command.bounded_console_command(argv)], environment, folder / CONSOLE)
        write_private(folder / PROCESS_FILE, msgspec.json.encode(process))

    def _connect(self, amphora_id: str, port: Port) -> None:
        wanted = f"connect port {port.id}"
        taps.ensure_tap(self._switch_name, port, self._segment(port.network_id, wanted), amphora_id)

    def _stop(self, amphora_id: str, wanted: str) -> None:
        process = self._process(amphora_id)
        if process is not None and not signal_and_wait([process], signal.SIGKILL, limit_wait(KILL_SECONDS)):
            raise ComputeError(wanted, "the QEMU process does not end after SIGKILL")
        (self._state_dirs.path(amphora_id) / PROCESS_FILE).unlink(missing_ok=True)

    def _remove_machine(self, amphora_id: str, wanted: str) -> None:
        self._stop(amphora_id, wanted)
        self._switch.disconnect_owner(amphora_id)


def _uid_of(user: str, wanted: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        remedy = "See [amp_compute_qemu] user."
        raise ComputeError(wanted, f"this machine has no user {user}", remedy, final=True) from None


def _add_interface(monitor: Monitor, port: Port, switch: str) -> None:
    """Add a missing interface; an interrupted attempt may have left a netdev or a descriptor of its name."""
    if device_id(port) in monitor.device_ids():
        return
    name = qemu_command.tap_options(port)["id"]
    monitor.try_execute("netdev_del", id=name)
    monitor.try_execute("closefd", fdname=name)
    with taps.open_tap(switch, port) as descriptor:
        monitor.send_descriptor(descriptor, name)
    monitor.execute("netdev_add", type="tap", id=name, fd=name)
    monitor.execute("device_add", **interface_options(port))


def _remove_interface(monitor: Monitor, port: Port) -> None:
    """Remove the interface of a port. If the guest does not release it, remove its network backend only."""
    if device_id(port) in monitor.device_ids():
        # QEMU refuses `device_del` only while an earlier `device_del` waits for the guest. So the refusal is ignored.
        monitor.try_execute("device_del", id=device_id(port))
        if not monitor.wait_until_removed(device_id(port), _RELEASE_SECONDS):
            words = (port.id, _RELEASE_SECONDS)
            LOG.warning(
                "the virtual machine did not release the interface of port %s within %g s, so the compute backend "
                "only disconnects the interface from the host",
                *words,
            )
    monitor.try_execute("netdev_del", id=qemu_command.tap_options(port)["id"])


def _make_overlay(folder: Path, wanted: str) -> None:
    temporary = f".{DISK}.new"
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", BASE, temporary]
    try:
        timeout = limit_wait(_OVERLAY_SECONDS)
        subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=timeout, check=True, umask=0o077)
    except subprocess.SubprocessError as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise ComputeError(wanted, f"qemu-img: {str(reason).strip()}") from error
    (folder / temporary).replace(folder / DISK)
