# SPDX-License-Identifier: Apache-2.0
"""The QEMU command line of a virtual machine.

Invariant: pure functions. No device depends on QEMU's defaults or configuration files. Paths are relative to the
machine's directory, which is QEMU's working directory. Only the last argument contains the directory: it identifies
the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from amphora_driver.compute import console
from amphora_driver.compute.architecture import AMD64, Architecture
from amphora_driver.compute.qmp import SOCKET
from amphora_driver.model.network import Port
from amphora_driver.network.bridges import peer_interface_name, switch_interface_name

DISK, DRIVE, CONSOLE, KERNEL, INITRD, PID = "disk.qcow2", "config.iso", "console.log", "kernel", "initrd", "qemu.pid"
# Size in MiB of QEMU's cache for translated code of the guest.
_TCG_CACHE_MIB = 128
# Address space in MiB that QEMU may use beside the memory of the guest. QEMU needed 700 MiB in a measurement.
_QEMU_OVERHEAD_MIB = 2048
_MIB = 2**20
# `exec` replaces the shell by QEMU. A child process copies QEMU's output to the console file.
_BOUNDED_CONSOLE = 'python=$0 writer=$1; shift; exec "$@" > >(exec "$python" -I -S "$writer") 2>&1'


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of a virtual machine. Memory in MiB.

    Attributes:
        kernel_arguments: arguments for the kernel in the machine's directory; None to use the disk's boot loader.
        initrd: whether that kernel has an initial RAM disk.
        user: the user that QEMU changes to after it has opened its files; None to keep the current user.
        runs_with: whether this QEMU has ``-run-with user=``, which replaces ``-runas`` (9.1).
    """

    program: str
    name: str
    machine: str
    accelerated: bool
    processors: int
    memory: int
    kernel_arguments: str | None = None
    initrd: bool = False
    architecture: Architecture = AMD64
    user: str | None = None
    runs_with: bool = False


def build_command(hardware: Hardware, folder: Path, ports: tuple[Port, ...]) -> list[str]:
    """Return the command line of a machine: program and arguments.

    The management port is the first of `ports`, whose taps must exist.
    """
    address_space = (hardware.memory + _QEMU_OVERHEAD_MIB) * _MIB
    argv = [
        *("prlimit", f"--as={address_space}", "--core=0", "--", "setpriv", "--no-new-privs", "--"),
        *_machine_options(hardware),
        *_user_options(hardware),
        *("-qmp", f"unix:{SOCKET},server=on,wait=off"),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-drive", f"file={DISK},format=qcow2,if=none,id=disk,discard=unmap"),
    ]
    for port in ports:
        backend, device = tap_options(port), interface_options(port)
        argv += ["-netdev", _option_string(backend), "-device", _option_string(device)]
    if hardware.kernel_arguments is not None:
        argv += ["-kernel", KERNEL, *(("-initrd", INITRD) if hardware.initrd else ())]
        argv += ["-append", hardware.kernel_arguments]
    return [*argv, "-pidfile", str(folder / PID)]


def bounded_console_command(argv: Sequence[str]) -> list[str]:
    """Return the command with its output limited to the size of a console file (`console`).

    The standard output of the command must be the console file, open for appending.
    """
    return ["bash", "-c", _BOUNDED_CONSOLE, sys.executable, console.__file__, *argv]


def _user_options(hardware: Hardware) -> list[str]:
    """Return the options for QEMU's user and its system call filter.

    QEMU opens the disk, the taps and /dev/kvm before it changes to this user. The filter starts even earlier. The
    filter counts a change of the user as an elevation of privileges and must then allow elevations. The new user has no
    privileges.
    """
    filtered = "on,obsolete=deny,elevateprivileges={},spawn=deny,resourcecontrol=deny"
    if hardware.user is None:
        return ["-sandbox", filtered.format("deny")]
    become = ("-run-with", f"user={hardware.user}") if hardware.runs_with else ("-runas", hardware.user)
    return ["-sandbox", filtered.format("allow"), *become]


def manual_boot_command(
    hardware: Hardware, image: str, *, disk_format: str, forward: str, mac: str, firmware: str | None = None
) -> list[str]:
    """Return the command line for a manual boot: terminal console, QEMU's user network, temporary disk.

    Args:
        image: the disk; QEMU discards the writes of the guest.
        disk_format: raw or qcow2.
        forward: a forwarded port of this machine, in the syntax of ``hostfwd``.
        firmware: a file that replaces QEMU's default BIOS.
    """
    file = image.replace(",", ",,")
    return [
        *_machine_options(hardware),
        *(("-bios", firmware) if firmware is not None else ()),
        *("-chardev", "stdio,id=console,signal=on", "-serial", "chardev:console"),
        *("-drive", f"file={file},format={disk_format},if=none,id=disk,snapshot=on"),
        *("-netdev", f"user,id=net,hostfwd={forward}", "-device", f"virtio-net-pci,netdev=net,mac={mac},romfile="),
    ]


def _machine_options(hardware: Hardware) -> list[str]:
    """Return the options of both command lines: all except user, console, disk and network."""
    accelerator = "kvm" if hardware.accelerated else f"tcg,tb-size={_TCG_CACHE_MIB}"
    return [
        *(hardware.program, "-name", hardware.name, "-nodefaults", "-no-user-config", "-display", "none"),
        *("-machine", f"{hardware.machine},usb=off", "-accel", accelerator),
        *("-cpu", "host" if hardware.accelerated else hardware.architecture.emulated),
        *("-smp", str(hardware.processors), "-m", str(hardware.memory), "-rtc", "base=utc"),
        *("-device", "virtio-blk-pci,drive=disk,bootindex=1"),
        *("-drive", f"file={DRIVE},format=raw,if=none,id=drive,readonly=on", "-device", "virtio-blk-pci,drive=drive"),
        *("-device", "virtio-rng-pci", *(("-device", "vmgenid,guid=auto") if hardware.architecture.generation else ())),
    ]


def tap_options(port: Port) -> dict[str, str]:
    """Return the network backend of a port: options of ``-netdev`` and `netdev_add`."""
    name = switch_interface_name(port.id)
    return {"type": "tap", "id": name, "ifname": name, "script": "no", "downscript": "no"}


def interface_options(port: Port) -> dict[str, str | int]:
    """Return the interface of a port: options of ``-device`` and `device_add`."""
    return {
        "driver": "virtio-net-pci",
        "id": device_id(port),
        "netdev": switch_interface_name(port.id),
        "mac": port.mac,
        "host_mtu": port.mtu,
        "romfile": "",
    }


def device_id(port: Port) -> str:
    """Return the QEMU device id of the interface of a port."""
    return peer_interface_name(port.id)


def _option_string(options: dict[str, str] | dict[str, str | int]) -> str:
    first, *others = options.items()
    return ",".join((str(first[1]), *(f"{name}={value}" for name, value in others)))
