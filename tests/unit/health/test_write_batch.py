# SPDX-License-Identifier: Apache-2.0
"""Thousands of rows in one flush: several transactions, each with a limited number of rows."""

import pytest
from test_status_writer import HealthManager

from amphora_driver.database.tables import listener_statistics, object_status
from amphora_driver.health import status_writer
from amphora_driver.health.write_batch import Entry, split_entries


@pytest.fixture
def manager(database):
    made = HealthManager(database)
    made.load_balancer()
    return made


def test_thousands_of_rows_are_written_in_several_transactions(manager, monkeypatch):
    """Another flush after an error in one of them repeats the rest only."""
    monkeypatch.setattr(status_writer, "_MAX_WRITTEN", 3)
    for name in "23":
        manager.load_balancer(name)
    for name in "123":
        manager.say(f"am{name}", name)
    manager.flush()
    # Each load balancer has four statuses and one row of statistics.
    assert manager.trying.done == ["read", *["write"] * 6]
    assert manager.operating() == {f"{kind}{name}": "ONLINE" for kind in ("lb", "li", "po", "me") for name in "123"}
    assert len(manager.rows(listener_statistics)) == 3
    versions = {row.object_id: row.version for row in manager.rows(object_status)}
    assert not manager.flush()
    assert {row.object_id: row.version for row in manager.rows(object_status)} == versions


@pytest.mark.parametrize("most", [1, 2, 5, 7, 100])
def test_parts_have_every_row_once(most):
    entries = [
        Entry(f"lb{number}", observations=list(range(number)), rows=tuple(range(2 * number))) for number in range(1, 5)
    ]
    parts = split_entries(entries, most)
    assert max(sum(len(one.observations) + len(one.rows) for one in part) for part in parts) <= most
    for entry in entries:
        mine = [one for part in parts for one in part if one.load_balancer_id == entry.load_balancer_id]
        assert [row for one in mine for row in one.observations] == entry.observations
        assert tuple(row for one in mine for row in one.rows) == entry.rows
    for part in parts:
        observed = [one.load_balancer_id for one in part if one.observations]
        assert len(observed) == len(set(observed))
    assert len(parts) == 1 or most < 100
    assert split_entries([], most) == []
