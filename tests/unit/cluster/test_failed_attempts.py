# SPDX-License-Identifier: Apache-2.0
"""The limit of failed authentications: pauses, known callers, bounds."""

import logging
import multiprocessing
import os
import signal
import threading
from contextlib import contextmanager

import pytest

from amphora_cluster.api import counters, shared_memory
from amphora_cluster.api.attempts import (
    FORGOTTEN_AFTER,
    GROUP_FACTOR,
    LONGEST_PAUSE,
    Caller,
    FailedAttempts,
    Throttled,
)

MOST = 3
ENTRIES = 256


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def attempts(clock):
    return FailedAttempts(MOST, clock)


def caller(source="192.0.2.1", group="g1", credential="wrong"):
    return Caller(source=source, group_id=group, credential=credential)


def wait(attempts, one):
    """Return the seconds for which a caller is refused."""
    try:
        attempts.check(one)
    except Throttled as error:
        return error.seconds
    return 0


def fail(attempts, one, times=1):
    for _ in range(times):
        attempts.add_failure(one)


def test_each_failure_above_the_limit_doubles_the_pause(attempts, clock):
    fail(attempts, caller(), MOST)
    assert wait(attempts, caller()) == 0
    pauses = []
    for _ in range(8):
        fail(attempts, caller())
        pauses.append(wait(attempts, caller()))
        clock.now += pauses[-1]
        assert wait(attempts, caller()) == 0, "one attempt after each pause"
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]


def test_the_count_begins_again_after_a_time_without_failures(attempts, clock):
    fail(attempts, caller(), MOST + 1)
    clock.now += 1 + FORGOTTEN_AFTER + 1
    fail(attempts, caller(), MOST)
    assert wait(attempts, caller()) == 0


@pytest.mark.parametrize(
    ("source", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::1%eth1", True),
        ("unix:", "", False),
    ],
)
def test_the_sources(attempts, source, other, same):
    fail(attempts, caller(source), MOST + 1)
    assert (wait(attempts, caller(other, "g2")) > 0) is same


def test_a_group_is_limited_for_all_addresses_together(attempts):
    for number in range(MOST * GROUP_FACTOR + 1):
        fail(attempts, caller(f"192.0.2.{number}"))
    fresh = caller("198.51.100.1")
    assert wait(attempts, fresh) == 0, "its token may be valid"
    fail(attempts, fresh)
    assert wait(attempts, fresh) > 0
    assert wait(attempts, caller("198.51.100.1", "g2")) == 0


def test_a_known_caller_is_not_limited(attempts):
    known = caller(credential="right")
    attempts.add_success(known)
    fail(attempts, caller(), 50)
    assert wait(attempts, known) == 0
    assert wait(attempts, caller(credential="right", group="g2")) > 0, "a token of another group"
    assert wait(attempts, caller()) > 0
    fail(attempts, known)
    assert wait(attempts, known) > 0, "the token was deleted"


@pytest.fixture
def small(monkeypatch, clock):
    for name in ("MOST_SOURCES", "MOST_CALLERS"):
        monkeypatch.setattr(f"amphora_cluster.api.attempts.{name}", ENTRIES)
    return FailedAttempts(MOST, clock)


def test_the_memory_is_bounded(small, clock):
    attempts = small
    last = 10 * ENTRIES
    for number in range(last + 1):
        clock.now += 0.001
        attempts.add_success(caller(credential=str(number)))
    fail(attempts, caller(), MOST + 1)
    found = [wait(attempts, caller(credential=str(number))) == 0 for number in range(last + 1)]
    assert ENTRIES // 2 < sum(found) <= ENTRIES
    assert all(found[-20:]), "the entries without use for the longest time are forgotten"


def test_the_oldest_sources_are_forgotten(small, clock):
    attempts = small
    first = caller("10.0.0.1")
    fail(attempts, first, MOST + 7)
    for number in range(20 * ENTRIES):
        clock.now += 0.001
        attempts.add_failure(caller(f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}", f"g{number}"))
    assert wait(attempts, first) == 0


def in_process(work):
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(20)
    assert process.exitcode == 0


def test_processes_share_failures_and_known_callers(attempts):
    known = caller(credential="right")
    in_process(lambda: fail(attempts, caller(), MOST))
    assert wait(attempts, caller()) == 0
    in_process(lambda: fail(attempts, caller(), 1))
    assert wait(attempts, caller()) == 1
    assert wait(attempts, known) == 1
    in_process(lambda: attempts.add_success(known))
    assert wait(attempts, known) == 0


def test_a_process_that_was_killed_during_a_write_locks_out_no_caller(attempts):
    """Each part of an entry may be old, new, or zero."""
    fail(attempts, caller(), MOST + 1)
    with attempts._memory.locked() as memory:
        for place in range(0, attempts._known.end, shared_memory._ENTRY.size):
            key, used, _, _ = shared_memory._ENTRY.unpack_from(memory, place)
            if key != bytes(16):
                shared_memory._ENTRY.pack_into(memory, place, key, used, 1e300, 2**64 - 1)
    assert wait(attempts, caller()) == 0
    fail(attempts, caller())
    assert wait(attempts, caller()) == LONGEST_PAUSE


@contextmanager
def stopped_in(memory):
    """Stop a process that has the lock of a memory, as SIGSTOP or a frozen container does."""

    def stop():
        with memory.locked():
            os.kill(os.getpid(), signal.SIGSTOP)

    process = multiprocessing.get_context("fork").Process(target=stop)
    process.start()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)
        process.join(20)
    assert process.exitcode == 0


def ends_in_time(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_stopped_process_with_the_lock_blocks_no_other_process(attempts, caplog):
    known = caller(credential="right")
    attempts.add_success(known)
    fail(attempts, caller(), MOST)
    with stopped_in(attempts._memory):
        assert ends_in_time(lambda: fail(attempts, caller(), 1))
        assert wait(attempts, caller()) == 1, "the process counts on from the shared number"
        assert wait(attempts, known) == 0
    assert wait(attempts, caller()) == 0, "the count of the copy is lost"
    fail(attempts, caller(), 1)
    assert wait(attempts, caller()) == 1
    assert [one.levelname for one in caplog.records if "holds the lock" in one.getMessage()] == ["WARNING"]


def test_counters_wait_for_a_stopped_process(caplog):
    shared = counters.SharedCounters()
    shared.count(counters.INVALID)

    def numbers():
        [family] = shared.collect()
        return [one.value for one in family.samples]

    with stopped_in(shared._memory):
        assert ends_in_time(lambda: shared.count(counters.LIMITED))
        shared.count(counters.INVALID)
        assert numbers() == [1, 0, 0]
    shared.count(counters.REPLAYED)
    assert numbers() == [2, 1, 1]


def test_no_limit(clock):
    attempts = FailedAttempts(0, clock)
    fail(attempts, caller(), 1000)
    assert wait(attempts, caller()) == 0


def test_the_log_names_the_source_and_no_credential(attempts, caplog):
    caplog.set_level(logging.INFO)
    fail(attempts, caller(source="x" * 500 + "\n", credential="hush"), MOST + 1)
    assert "4 authentications failed for address" in caplog.text
    assert "hush" not in caplog.text
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
