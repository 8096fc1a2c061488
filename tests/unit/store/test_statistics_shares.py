# SPDX-License-Identifier: Apache-2.0
"""Provider agents of several hosts divide the listeners among them, each listener to one at a time."""

import pytest
import sqlalchemy as sa

from amphora_driver.database import clock
from amphora_driver.database.tables import duty
from amphora_driver.database.tables_fleet import process
from amphora_driver.provider_agent import statistics_shares
from amphora_driver.provider_agent.statistics_shares import PARTS, StatisticsShares, decide
from amphora_driver.store.process_registry import ProcessKind, ProcessRegistration


@pytest.fixture
def database(any_database, monkeypatch):
    """A database whose agents renew their parts at each call."""
    monkeypatch.setattr(statistics_shares, "_RENEWAL", 0.0)
    return any_database


def join(database, *names):
    for name in names:
        ProcessRegistration(database, name, ProcessKind.PROVIDER_AGENT).heartbeat()
    return [StatisticsShares(database, name) for name in names]


def look(agents):
    """Let each agent decide once; no part may have two owners."""
    for one in agents:
        one.parts()
    held = [one._held for one in agents]
    assert sum(map(len, held)) == len(frozenset().union(*held)), held
    return held


def test_one_agent_has_all_parts(database):
    (alone,) = join(database, "a")
    assert alone.parts() == frozenset(PARTS)
    recorded = sa.select(sa.func.count()).select_from(duty).where(duty.c.owner == "a")
    assert database.read(lambda connection: connection.execute(recorded).scalar_one()) == len(PARTS)


def test_agents_that_start_together_have_equal_numbers(database):
    assert [len(one) for one in look(join(database, "a", "b", "c"))] == [6, 6, 4]


def test_a_new_agent_gets_its_number_one_part_after_the_other(database):
    (first,) = join(database, "a")
    first.parts()
    agents = [first, *join(database, "b")]
    numbers = [tuple(map(len, look(agents))) for _ in range(10)]
    assert numbers[-1] == (8, 8)
    assert all(sum(one) >= len(PARTS) - 1 for one in numbers), numbers


def test_the_others_take_the_parts_of_an_agent_that_ends(database):
    agents = join(database, "a", "b")
    look(agents)
    agents[1].release()
    database.write(lambda connection: connection.execute(process.delete().where(process.c.name == "b")))
    assert agents[0].parts() == frozenset(PARTS)


def test_parts_of_a_living_agent_that_reports_nothing_do_not_stay_free(database):
    agents = join(database, "a", "b")
    look(agents)
    look(agents)
    agents[1].release()
    numbers = [len(agents[0].parts()) for _ in range(8)]
    assert numbers[0] == 8, "the other agent has time to take its parts again"
    assert all(number >= len(PARTS) - 2 for number in numbers[1:]), numbers


def test_a_part_moves_after_its_lease_has_expired(database):
    agents = join(database, "a", "b")
    look(agents)
    database.write(lambda connection: connection.execute(duty.update().values(leased_until=1.0)))
    assert len(agents[1].parts()) == 8
    assert not agents[1]._held & agents[0].parts()


def test_a_long_call_keeps_its_parts_and_gets_no_others_back(database):
    def expiries(connection):
        names = sa.select(duty.c.name, duty.c.leased_until - clock.now(connection))
        return {name[-1]: float(left) for name, left in connection.execute(names)}

    (one,) = join(database, "a")
    one.parts()
    soon = duty.update().where(duty.c.name != "statistics-0")
    database.write(lambda connection: connection.execute(soon.values(leased_until=clock.now(connection) + 3)))
    gone = duty.update().where(duty.c.name == "statistics-0")
    database.write(lambda connection: connection.execute(gone.values(leased_until=clock.now(connection) - 3)))
    one.extend()
    left = database.read(expiries)
    assert left.pop("0") < 0
    assert min(left.values()) > 3


def test_no_call_starts_shortly_before_the_end_of_the_lease(database, monkeypatch):
    (one,) = join(database, "a")
    assert one.parts() == frozenset(PARTS)
    monkeypatch.setattr(statistics_shares, "_RENEWAL", 1000.0)
    assert one.parts() == frozenset(PARTS)
    monkeypatch.setattr(statistics_shares, "_LEAST", statistics_shares._LEASE)
    assert one.parts() == frozenset()
    assert not one.may_call()


def test_no_call_starts_without_leases(database):
    (one,) = join(database, "a")
    assert not one.may_call()
    one.parts()
    assert one.may_call()
    one.release()
    assert not one.may_call()


def test_a_repeated_transaction_takes_no_part_of_another_agent(database, monkeypatch):
    write = database.write

    def repeat(function):
        with database.engine.connect() as connection:
            function(connection)
            connection.rollback()
        return write(function)

    first, _ = join(database, "a", "b")
    monkeypatch.setattr(database, "write", repeat)
    assert len(first.parts()) == len(PARTS) // 2


@pytest.mark.parametrize("number", [1, 2, 3, 5, 16, 40])
def test_no_decision_returns_what_it_keeps(number):
    for held in (PARTS, PARTS[:9], PARTS[:1], ""):
        rest = [one for one in PARTS if one not in held]
        found = decide(held, rest, (), number)
        assert not found.kept & found.returned
        assert found.kept | found.returned >= set(held)
        share = -(-len(PARTS) // number)
        assert len(found.kept) <= max(share, len(held) - 1)
        assert decide(held, rest, rest, number).kept >= set(rest)
        assert len(decide(held, rest, (), number, first=True).kept) <= share
