# SPDX-License-Identifier: Apache-2.0
"""The SQLite write lock, and waiting threads while its owner is stopped."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from amphora_driver.database import engine, sqlite_write_lock
from amphora_driver.database.tables import duty
from amphora_driver.errors import StoreError

# Seconds that only a very busy machine needs.
AT_ONCE = 20.0


@pytest.fixture
def place(tmp_path):
    return tmp_path / "file.lock"


@contextmanager
def taken(place):
    """Hold the lock through another file description, which has the same effect as another process."""
    with place.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def waiting():
    return [one for one in threading.enumerate() if one.name == "database write lock"]


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def no_thread_waits():
    deadline = time.monotonic() + AT_ONCE
    while waiting():
        assert time.monotonic() < deadline, "a thread is waiting for the lock"
        time.sleep(0.01)


def test_a_free_write_lock_is_acquired_at_once(place):
    turns = sqlite_write_lock.LockFile(str(place))
    os.close(turns.acquire(0.0))
    os.close(turns.acquire(0.0))
    assert waiting() == []


def test_a_waiting_thread_acquires_the_released_lock(place):
    turns, got = sqlite_write_lock.LockFile(str(place)), []
    first = turns.acquire(0.0)
    waiter = threading.Thread(target=lambda: got.append(turns.acquire(AT_ONCE)))
    waiter.start()
    assert not got
    os.close(first)
    waiter.join(AT_ONCE)
    with pytest.raises(StoreError):
        turns.acquire(0.05)
    os.close(got[0])
    no_thread_waits()


def test_a_time_out_names_the_lock_file(place):
    script = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX); print(1); sys.stdin.read()"
    argv = [sys.executable, "-uc", script, str(place)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(
            StoreError, match=rf"write lock was not free within 0 s: process {holder.pid} \(python[^)]*\) holds it"
        ):
            sqlite_write_lock.LockFile(str(place)).acquire(0.05)
        holder.stdin.close()
    no_thread_waits()


def test_an_inaccessible_lock_file_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"nowhere/file\.lock: No such file or directory"):
        sqlite_write_lock.LockFile(str(tmp_path / "nowhere/file.lock")).acquire(0.0)


@pytest.mark.parametrize("contended", [False, True])
def test_a_file_system_without_locks_is_named_and_no_file_stays_open(place, monkeypatch, contended):
    """Some network file systems refuse both kinds of lock requests."""

    def refuse(_descriptor, how):
        if contended and how & fcntl.LOCK_NB:
            raise BlockingIOError
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(sqlite_write_lock.fcntl, "flock", refuse)
    before = descriptors()
    with pytest.raises(StoreError, match="No locks available"):
        sqlite_write_lock.LockFile(str(place)).acquire(AT_ONCE)
    assert descriptors() == before


def test_an_abandoned_waiter_delays_no_other_writer(place):
    turns = sqlite_write_lock.LockFile(str(place))
    with taken(place), pytest.raises(StoreError):
        turns.acquire(0.05)
    no_thread_waits()
    os.close(sqlite_write_lock.LockFile(str(place)).acquire(AT_ONCE))


def test_an_abandoned_waiter_is_reused(place):
    """While the owner is stopped, each concurrent writer has one thread, independent of its attempts."""
    turns = sqlite_write_lock.LockFile(str(place))
    with taken(place):
        for _ in range(20):
            with pytest.raises(StoreError):
                turns.acquire(0.01)
        assert len(waiting()) == 1
        before = descriptors()
        with pytest.raises(StoreError):
            turns.acquire(0.01)
        assert descriptors() == before
        got = []
        waiter = threading.Thread(target=lambda: got.append(turns.acquire(AT_ONCE)))
        waiter.start()
    waiter.join(AT_ONCE)
    os.close(got[0])
    no_thread_waits()


def test_a_stopped_writer_causes_a_time_out(database, monkeypatch):
    monkeypatch.setattr(engine, "_WRITE_LOCK_SECONDS", 0.1)

    def sign(connection):
        connection.execute(duty.insert().values(name="x", owner="", epoch=0, leased_until=0.0))

    with taken(Path(f"{database.engine.url.database}.lock")):
        with pytest.raises(StoreError, match="write lock was not free"):
            database.write(sign)
        assert database.read(lambda c: c.execute(duty.select()).all()) == []
    database.write(sign)
    assert len(database.read(lambda c: c.execute(duty.select()).all())) == 1
    no_thread_waits()
