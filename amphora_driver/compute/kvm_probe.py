# SPDX-License-Identifier: Apache-2.0
"""Whether this machine's processors can run guests, or qemu has to.

Invariant: what decides is a guest that was run, not a device that is there: under some hypervisors ``/dev/kvm`` answers
to everything and executes a kernel's code some hundred times slower than qemu would.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

# A boot sector: count down from 2^26, say so to the port at which qemu ends, stop. (Intel SDM, volume 2.)
_PROGRAM = bytes.fromhex(
    "66b900000004"  # mov ecx, 0x04000000
    "6649"  # again: dec ecx
    "75fc"  # jnz again
    "b010"  # mov al, 0x10
    "ba0105"  # mov dx, 0x501
    "ee"  # out dx, al
    "f4"  # halt: hlt
    "ebfd"  # jmp halt
)
_SECTOR = _PROGRAM.ljust(510, b"\0") + b"\x55\xaa"
# With isa-debug-exit qemu ends with twice what was written, plus one.
_COUNTED = 2 * 0x10 + 1
# Seconds it may take with qemu's start and its BIOS: a processor takes a tenth of a second, qemu itself about one.
_SECONDS = 5.0
_HELP_SECONDS = 30.0


@lru_cache(maxsize=4)
def supports_run_with_user(program: str) -> bool:
    """Whether a qemu has the option ``-run-with user=``; older ones have ``-runas``.

    Args:
        program: the qemu to ask.

    Raises:
        OSError: it cannot be started.
    """
    said = subprocess.run([program, "-help"], capture_output=True, text=True, timeout=_HELP_SECONDS, check=False)
    return re.search(r"^-run-with .*user=", said.stdout, re.MULTILINE) is not None


@lru_cache(maxsize=4)
def usable(program: str) -> bool:
    """Whether a guest runs under KVM; found out once in a process.

    Args:
        program: the qemu to ask.

    Raises:
        OSError: it cannot be started.
    """
    if not Path("/dev/kvm").exists():
        return False
    return guest_finishes(program, "kvm", _SECONDS)


def guest_finishes(program: str, accelerator: str, seconds: float) -> bool:
    """Whether a guest gets its sum done in so many seconds."""
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
