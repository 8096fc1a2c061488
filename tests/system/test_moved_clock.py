# SPDX-License-Identifier: Apache-2.0
"""A program under `moved_clock` computes and waits as fast as an ordinary one."""

import os
import subprocess
import sys
import time

import moved_clock
import pytest

HOUR = 3600.0
# The main thread has the GIL with a switch interval of an hour, and another thread requests it.
GIL = """
import sys, threading, time
sys.setswitchinterval(3600)
woken, ran = threading.Event(), []
threading.Thread(target=lambda: (woken.wait(), ran.append(True)), daemon=True).start()
woken.set()
until = time.monotonic() + 0.5
while time.monotonic() < until and not ran:
    pass
print("its wait has ended" if ran else "it waits")
"""


@pytest.fixture(params=[0.0, HOUR, -HOUR])
def clock(request, tmp_path):
    assert moved_clock.is_there(), "install the package faketime"
    clock = moved_clock.Clock(tmp_path)
    clock.set(request.param)
    return clock


def said(clock, program):
    """Return the output of a Python program with this clock."""
    environment = {**os.environ, **clock.environment()}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True, timeout=60
    )
    return done.stdout.decode().strip()


def test_a_thread_waits_for_the_gil(clock):
    assert said(clock, GIL) == "it waits"


def test_the_monotonic_clock_does_not_move(clock):
    before = time.monotonic()
    assert before <= float(said(clock, "import time; print(time.monotonic())")) <= time.monotonic()
