# SPDX-License-Identifier: Apache-2.0
"""One deadline for an operation and all its parts."""

import threading

import pytest

from amphora_driver import deadline
from amphora_driver.deadline import Deadline
from amphora_driver.errors import DeadlinePassed


def test_a_part_ends_at_the_latest_with_the_whole_operation():
    whole = Deadline(10)
    assert whole.within(3).left() <= 3
    assert 3 < whole.within(60).left() <= 10


def test_waiting_process_uses_little_cpu():
    whole = Deadline(10)
    assert whole.limit_wait(3) == 3
    assert 9 < whole.limit_wait(60) <= 10
    with pytest.raises(DeadlinePassed, match="boot"):
        Deadline(0, "boot it").limit_wait(3)


def test_a_nested_deadline_never_extends_the_outer_one():
    whole = Deadline(60)
    part = whole.within(30).within(20)
    threading.Thread(target=whole.bring_forward, args=("it is deleted", 5)).start()
    while part.left() > 5:
        pass
    whole.bring_forward("another reason", 50)
    assert part.left() <= 5
    whole.bring_forward("now")
    assert part.passed()
    with pytest.raises(DeadlinePassed, match="it is deleted"):
        part.limit_wait(1)


def test_backends_keep_the_deadline_of_their_operation():
    assert deadline.limit_wait(7) == 7, "no deadline is set"
    with deadline.apply_deadline(Deadline(2)):
        assert deadline.limit_wait(7) <= 2
        with deadline.apply_deadline(Deadline(1)):
            assert deadline.limit_wait(7) <= 1
        assert deadline.limit_wait(7) > 1
    with deadline.apply_deadline(Deadline(-1)), pytest.raises(DeadlinePassed):
        deadline.limit_wait(7)
