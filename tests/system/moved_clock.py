# SPDX-License-Identifier: Apache-2.0
"""Sets the clock of running programs, like a correction by an operator.

Invariant: only the wall clock moves (libfaketime reads its offset from a file at each call). The monotonic clock stays
the kernel's own, as after a change of a real machine's clock.
"""

import os
from pathlib import Path

import msgspec

# $LIB is for the dynamic linker: where libraries of this architecture are.
_LIBRARY = "/usr/$LIB/faketime/libfaketimeMT.so.1"
# libfaketime 0.9.10 makes clock_nanosleep(2) of the monotonic clock fail (EINVAL), and Python's sleep uses that call.
_SLEEP = """import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
# With glibc 2.30 and newer, libfaketime 0.9.10 gives each timed wait for a condition a deadline of decades ago. So a
# thread that waits for Python's GIL takes a processor until it gets the GIL. Four threads then do a tenth of the work
# of one. With "0", libfaketime does not change the monotonic deadline (needs_forced_monotonic_fix).
_DEADLINES = {"FAKETIME_FORCE_MONOTONIC_FIX": "0"}


class Clock:
    """One clock, for all programs that are started with it.

    Args:
        folder: a folder of one test.
    """

    def __init__(self, folder):
        # HAProxy reads the file too, as another user.
        folder.chmod(0o755)
        self._file = folder / "clock"
        self._modules = folder / "modules"
        self._modules.mkdir()
        (self._modules / "sitecustomize.py").write_text(_SLEEP, encoding="ascii")
        self.set(0.0)

    def set(self, ahead):
        """Set the clock to the true time plus an offset in seconds."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead:+.0f}\n", encoding="ascii")
        new.replace(self._file)

    def environment(self):
        """Return the environment of a program that uses this clock."""
        before = os.environ.get("PYTHONPATH")
        return {
            "LD_PRELOAD": _LIBRARY,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
            **_DEADLINES,
            "PYTHONPATH": f"{self._modules}:{before}" if before else str(self._modules),
        }

    def words(self):
        """Return the environment as a command prefix."""
        return ("env", *(f"{name}={value}" for name, value in self.environment().items()))

    def restart(self, stack, *names):
        """Restart programs of a sandbox with this clock."""
        programs = [one for one in stack.programs() if one.name in names]
        assert len(programs) == len(names)
        for one in programs:
            stack.supervision.stop(one.name)
        for one in programs:
            stack.supervision.start(msgspec.structs.replace(one, argv=(*self.words(), *one.argv)))
        for one in programs:
            stack.supervision.wait_ready(one, 60.0)

    def interpreter(self, file, python):
        """Return a Python for amphorae that use this clock."""
        text = " ".join(f"'{word}'" for word in self.words())
        new = file.with_suffix(".new")
        new.write_text(f'#!/bin/sh\nexec {text} {python} "$@"\n', encoding="ascii")
        new.chmod(0o755)
        new.replace(file)


def is_there():
    """Return whether libfaketime is installed."""
    return any(Path("/usr").glob("lib*/*/faketime/libfaketimeMT.so.1"))
