# SPDX-License-Identifier: Apache-2.0
"""The rate limit of boots."""

import pytest

from amphora_driver.compute.boot_rate import BootRate


def test_a_burst_starts_at_once_and_later_boots_follow_at_the_rate():
    rate = BootRate(2.0, burst=3)
    waits = [rate.reserve(str(number), 100.0) for number in range(6)]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.5, 1.0, 1.5])


def test_a_repeated_call_returns_the_rest_of_the_reservation():
    rate = BootRate(1.0, burst=1)
    rate.reserve("first", 100.0)
    assert rate.reserve("second", 100.0) == pytest.approx(1.0)
    assert rate.reserve("second", 100.75) == pytest.approx(0.25)
    assert rate.reserve("second", 101.0) == 0.0


def test_an_urgent_boot_starts_at_once_and_delays_the_later_ones():
    rate = BootRate(1.0, burst=1)
    assert rate.reserve("first", 100.0) == 0.0
    assert rate.reserve("fail-over", 100.0, urgent=True) == 0.0
    assert rate.reserve("second", 100.0) == pytest.approx(2.0)


def test_a_waiting_boot_that_becomes_urgent_starts_at_once():
    rate = BootRate(1.0, burst=1)
    rate.reserve("first", 100.0)
    assert rate.reserve("second", 100.0) > 0.0
    assert rate.reserve("second", 100.0, urgent=True) == 0.0


def test_a_pause_permits_a_burst_and_no_more():
    rate = BootRate(1.0, burst=2)
    for number in range(4):
        rate.reserve(f"early {number}", 100.0)
    assert [rate.reserve(f"late {number}", 200.0) for number in range(3)] == pytest.approx([0.0, 0.0, 1.0])


def test_without_a_rate_every_boot_starts_at_once():
    rate = BootRate(0.0, burst=1)
    assert [rate.reserve(str(number), 100.0) for number in range(100)] == [0.0] * 100


def test_reservations_of_deleted_load_balancers_are_removed():
    rate = BootRate(1.0, burst=1)
    rate.reserve("first", 100.0)
    rate.reserve("deleted", 100.0)
    rate.reserve("other", 1000.0)
    assert "deleted" not in rate._reserved
