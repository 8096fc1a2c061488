# SPDX-License-Identifier: Apache-2.0
"""Tests whether KVM works on this machine, or QEMU must emulate the processor.

Invariant: only a guest that runs to its end proves that KVM works. Under some hypervisors ``/dev/kvm`` exists and
answers all requests, but runs a kernel some hundred times slower than emulation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

# This boot sector counts down from 2^26, writes to the port that ends QEMU, and halts (Intel SDM, volume 2). Its code:
# mov ecx, 0x04000000; again: dec ecx; jnz again; mov al, 0x10; mov dx, 0x501; out dx, al; halt: hlt; jmp halt.
_PROGRAM = bytes.fromhex("66b900000004 6649 75fc b010 ba0105 ee f4 ebfd")
_SECTOR = _PROGRAM.ljust(510, b"\0") + b"\x55\xaa"
# Exit status of QEMU after the boot sector has counted: the device isa-debug-exit returns twice the written value plus
# one.
_COUNTED = 2 * 0x10 + 1
# Time-out in seconds of the test for KVM. QEMU with its BIOS starts in one second, and the loop of the boot sector
# takes 0.1 s with KVM.
_SECONDS = 5.0
_HELP_SECONDS = 30.0


@lru_cache(maxsize=4)
def supports_run_with_user(program: str) -> bool:
    """Return whether this QEMU has the option ``-run-with user=``; older versions have ``-runas``.

    Raises:
        OSError: the program does not start.
    """
    listed = subprocess.run([program, "-help"], capture_output=True, text=True, timeout=_HELP_SECONDS, check=False)
    return re.search(r"^-run-with .*user=", listed.stdout, re.MULTILINE) is not None


@lru_cache(maxsize=4)
def usable(program: str) -> bool:
    """Return whether a guest runs with KVM. The process caches the result.

    Raises:
        OSError: the program does not start.
    """
    return Path("/dev/kvm").exists() and guest_finishes(program, "kvm", _SECONDS)


def guest_finishes(program: str, accelerator: str, seconds: float) -> bool:
    """Return whether the test guest counts to its end within this number of seconds."""
    with tempfile.NamedTemporaryFile() as disk:
        disk.write(_SECTOR)
        disk.flush()
        argv = [
            *(program, "-accel", accelerator, "-cpu", "max", "-machine", "pc", "-m", "64"),
            *("-display", "none", "-nodefaults", "-no-user-config"),
            *("-device", "isa-debug-exit,iobase=0x501,iosize=1"),
            *("-drive", f"file={disk.name},format=raw,if=ide,readonly=off,snapshot=on"),
        ]
        try:
            ended = subprocess.run(argv, capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == _COUNTED
