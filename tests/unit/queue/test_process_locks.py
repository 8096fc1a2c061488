# SPDX-License-Identifier: Apache-2.0
"""Process locks of this host, with real processes."""

import os
import signal
import subprocess
import sys

import pytest

from amphora_driver.queue.process_locks import ProcessLock

LIVE = """
import sys, signal
from amphora_driver.queue.process_locks import ProcessLock
with ProcessLock(*sys.argv[1:]):
    print("here", flush=True)
    signal.pause()
"""


@pytest.fixture
def other(tmp_path):
    """Start another process that holds its lock under this name."""
    name = "some host/1:77:abc"
    with subprocess.Popen([sys.executable, "-c", LIVE, str(tmp_path), name], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        yield process, name
        process.kill()


def test_a_live_process_is_kept_and_a_killed_one_is_found(tmp_path, other):
    process, name = other
    freed = []
    with ProcessLock(str(tmp_path), "me") as presence:
        assert presence.reap_dead(freed.append) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        assert presence.reap_dead(freed.append) == [name]
        assert freed == [name]
        assert presence.reap_dead(freed.append) == [], "the killed process is reported once"
    assert list(tmp_path.iterdir()) == [], "no file of an ended process remains"


def test_a_dead_process_with_remaining_jobs_is_found_again(tmp_path, other):
    process, name = other
    process.kill()
    process.wait(10)

    def away(_name):
        raise OSError("the database is away")

    with ProcessLock(str(tmp_path), "me") as presence:
        with pytest.raises(OSError, match="away"):
            presence.reap_dead(away)
        assert presence.reap_dead(lambda _: None) == [name]


def test_a_process_of_another_kernel_is_ignored(tmp_path):
    """Another host mounts the directory, and locks are local: its file looks like that of a dead process."""
    command = [sys.executable, "-c", LIVE, str(tmp_path), "far", "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        process.kill()
    with ProcessLock(str(tmp_path), "me") as presence:
        assert presence.reap_dead(pytest.fail) == []
    assert [path.name for path in tmp_path.iterdir()] == ["far.0b9d1c52-7f0e.lives"]
    with ProcessLock(str(tmp_path), "me", "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11") as presence:
        assert presence.reap_dead(lambda _: None) == ["far"]
