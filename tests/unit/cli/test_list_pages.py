# SPDX-License-Identifier: Apache-2.0
"""Lists of a large fleet have pages: `--limit` and `--marker`."""

import json
import uuid

import migrated
import pytest

from amphora_driver.cli import command, queries
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job

NUMBER = 7


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Load balancers with one amphora each. The commands read them in parts of two."""
    monkeypatch.setattr(queries, "_PART", 2)
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url)

    def fill(connection):
        for number in range(NUMBER):
            lb = str(uuid.uuid5(uuid.NAMESPACE_OID, str(number)))
            work = {"load_balancer_id": lb, "op": "apply", "generation": 1, "project_id": f"p{number % 2}"}
            connection.execute(job.insert().values(**work))
            machine = {
                "id": str(uuid.uuid4()),
                "load_balancer_id": lb,
                "role": "STANDALONE",
                "state": "ready",
                "heartbeat_key": b"",
            }
            times = {"created_at": 1.0, "certificate_issued_at": 1.0, "certificate_expires_at": 1e10 + number}
            connection.execute(amphora.insert().values(**machine, **times))

    database.write(fill)
    database.dispose()
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {url}\n")
    return path


def ids(amphoractl, configuration, *words):
    status, out, err = amphoractl(configuration, *words, "-f", "json")
    assert status == 0, err
    return [next(iter(row.values())) for row in json.loads(out)], err


@pytest.mark.parametrize("words", [("loadbalancer", "list"), ("amphora", "list"), ("certificate", "list")])
def test_the_pages_together_are_the_whole_list(amphoractl, configuration, words):
    everything, err = ids(amphoractl, configuration, *words, "--limit", "0")
    assert len(everything) == len(set(everything)) == NUMBER
    assert "more rows follow" not in err
    found, marker = [], ()
    for size in (3, 3, 1):
        page, err = ids(amphoractl, configuration, *words, "--limit", "3", *marker)
        assert len(page) == size
        assert ("more rows follow" in err) is (size == 3), err
        found, marker = found + page, ("--marker", page[-1])
    assert found == everything
    assert ids(amphoractl, configuration, *words, *marker)[0] == []


def test_a_page_of_a_filtered_list_is_full(amphoractl, configuration):
    one = ("loadbalancer", "list", "--project", "p1")
    everything, _ = ids(amphoractl, configuration, *one)
    assert len(everything) == NUMBER // 2
    page, _ = ids(amphoractl, configuration, *one, "--limit", "2")
    assert page == everything[:2]
    page, _ = ids(amphoractl, configuration, *one, "--stale", "--limit", "2", "--marker", page[0])
    assert page == everything[1:3]


@pytest.mark.parametrize("words", [("loadbalancer", "list"), ("amphora", "list"), ("certificate", "list")])
def test_only_a_table_has_a_limit_by_default(amphoractl, configuration, words, monkeypatch):
    monkeypatch.setattr(command, "_PAGE", 3)
    for form, rows in (("table", 3), ("json", NUMBER), ("value", NUMBER), ("csv", NUMBER), ("yaml", NUMBER)):
        status, out, err = amphoractl(configuration, *words, "-f", form)
        assert status == 0, err
        everything = ids(amphoractl, configuration, *words, "--limit", "0")[0]
        assert sum(one in out for one in everything) == rows, form
        assert ("more rows follow" in err) is (rows < NUMBER), form
    status, out, err = amphoractl(configuration, *words)
    assert (status, "more rows follow" in err) == (0, True)
    assert len(ids(amphoractl, configuration, *words, "--limit", "2")[0]) == 2


def test_a_page_of_amphorae_reads_one_row_more_than_it_shows(amphoractl, configuration, monkeypatch):
    read_rows, lengths = command.PagedLister.page, []

    def count(self, rows, parsed_args):
        listed = list(rows)
        lengths.append(len(listed))
        return read_rows(self, listed, parsed_args)

    monkeypatch.setattr(command.PagedLister, "page", count)
    everything, _ = ids(amphoractl, configuration, "amphora", "list", "--limit", "0")
    for marker in ((), ("--marker", everything[1])):
        page, err = ids(amphoractl, configuration, "amphora", "list", "--stale", "--limit", "2", *marker)
        begin = 2 if marker else 0
        assert (page, "more rows follow" in err) == (everything[begin : begin + 2], True)
    assert lengths == [NUMBER, 3, 3]


@pytest.mark.parametrize("words", [("loadbalancer", "list"), ("amphora", "list")])
def test_an_unknown_marker_is_an_error(amphoractl, configuration, words):
    status, _, err = amphoractl(configuration, *words, "--marker", "unknown")
    assert status != 0
    assert "unknown" in err
