# SPDX-License-Identifier: Apache-2.0
"""A process is identified by PID and start time; no other process gets a signal."""

import os
import signal
import sys
import time

import msgspec
import pytest

from amphora_driver.host.detached_process import Process, find_by_last_argument, identify, signal_and_wait, spawn


@pytest.fixture
def sleeper(tmp_path):
    process = spawn([sys.executable, "-c", "import time; print('up'); time.sleep(60)"], os.environ, tmp_path / "log")
    yield process
    signal_and_wait([process], signal.SIGKILL, 5)


def test_a_detached_process_has_its_own_session(sleeper):
    assert sleeper.alive()
    assert os.getsid(sleeper.pid) == sleeper.pid != os.getsid(0)


def test_a_process_is_found_by_its_recorded_identity(sleeper):
    assert msgspec.json.decode(msgspec.json.encode(sleeper), type=Process).alive()


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another"}])
def test_process_with_a_reused_pid_gets_no_signal(sleeper, change):
    other = msgspec.structs.replace(sleeper, **change)
    assert not other.alive()
    assert not other.signal(signal.SIGKILL)
    assert other.wait(0)
    assert other.children() == []
    assert sleeper.alive()


def test_end_waits_and_reaps(sleeper):
    begun = time.monotonic()
    assert signal_and_wait([sleeper], signal.SIGTERM, 10)
    assert time.monotonic() - begun < 5
    assert not sleeper.alive()
    assert identify(sleeper.pid) is None
    assert not sleeper.signal(signal.SIGTERM)


def test_a_zombie_counts_as_ended(sleeper):
    os.kill(sleeper.pid, signal.SIGKILL)
    assert sleeper.wait(5)
    assert not sleeper.alive()


def test_wait_times_out(sleeper):
    assert not sleeper.wait(0.01)


@pytest.mark.parametrize("start", ["begin()", "import threading; threading.Thread(target=begin).start()"])
def test_all_children_are_found(tmp_path, start):
    """Children of all threads are included."""
    child = "import time; time.sleep(60)"
    script = f"import subprocess, sys\ndef begin(): subprocess.run([sys.executable, '-c', '{child}'])\n{start}"
    process = spawn([sys.executable, "-c", script], os.environ, tmp_path / "log")
    try:
        deadline = time.monotonic() + 10
        while not process.children() and time.monotonic() < deadline:
            process.wait(0.02)
        assert len(process.children()) == 1
    finally:
        assert signal_and_wait([*process.children(), process], signal.SIGKILL, 5)


def test_process_is_found_by_its_last_argument(tmp_path):
    mark = str(tmp_path / "an unused name")
    process = spawn([sys.executable, "-c", "import time; time.sleep(60)", mark], os.environ, tmp_path / "log")
    try:
        assert find_by_last_argument(mark) == [process]
    finally:
        signal_and_wait([process], signal.SIGKILL, 5)
    assert find_by_last_argument(mark) == []


def test_process_is_found_during_execve(tmp_path):
    """During execve(2) the kernel shows no arguments. A boot that misses the process would start a second one."""
    mark = str(tmp_path / "an unused name")
    process = spawn(
        ["sh", "-c", 'exec sh -c "$0" "$0" "$1"', 'exec sh -c "$0" "$0" "$1"', mark], os.environ, tmp_path / "log"
    )
    try:
        assert [find_by_last_argument(mark) for _ in range(200)] == [[process]] * 200
    finally:
        signal_and_wait([process], signal.SIGKILL, 5)


def test_a_missing_program_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        spawn(["no-such-program"], os.environ, tmp_path / "log")


def test_output_is_logged_and_a_descriptor_is_passed_on(tmp_path):
    reader, writer = os.pipe()
    process = spawn(
        [sys.executable, "-c", "import os; os.write(3, b'x'); print('said')"], os.environ, tmp_path / "log", writer
    )
    os.close(writer)
    assert os.read(reader, 10) == b"x"
    os.close(reader)
    assert process.wait(10)
    assert (tmp_path / "log").read_text() == "said\n"
