# SPDX-License-Identifier: Apache-2.0
"""The operator's commands, against a real database, wired as setup.cfg wires them."""

from __future__ import annotations

import json
import time

import pytest

from amphora_driver.cli.main import COMMANDS, main
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Profile, Vip
from amphora_driver.model.vocabulary import ListenerProtocol
from amphora_driver.store import migrate, wanted
from amphora_driver.store.engine import Database
from amphora_driver.store.tables import amphora, amphora_seen, request, work

LB = "52cf0000-0000-4000-8000-000000000001"
OTHER = "52cf0000-0000-4000-8000-000000000002"
LISTENER = "11500000-0000-4000-8000-000000000001"
AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"


@pytest.fixture
def config_file(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrate.upgrade(url)
    database = Database(url)
    database.write(fill)
    database.dispose()
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[store]\nconnection = {url}\n")
    return path


def fill(connection):
    tree = LoadBalancer(
        id=LB,
        project_id="project",
        name="web",
        vip=Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p"),
        profile=Profile(compute="netns", network="local", timeout_tunnel=60000),
        listeners=(Listener(id=LISTENER, loadbalancer_id=LB, protocol=ListenerProtocol.HTTP, protocol_port=80),),
    )
    wanted.insert(connection, LB, 8, list(wanted.flatten(tree)))
    for lb, project, dirty in ((LB, "project", True), (OTHER, "another", False)):
        connection.execute(
            work.insert().values(
                load_balancer_id=lb,
                project_id=project,
                compute="netns",
                network="local",
                op="apply",
                generation=8,
                applied=7,
                dirty=dirty,
                owner="controller-1" if dirty else None,
                attempts=2,
                error="no such interface",
                leased_until=1e9,
            )
        )
    for generation, applied in ((7, 1000.25), (8, None)):
        connection.execute(
            request.insert().values(
                load_balancer_id=LB,
                generation=generation,
                action="listener_create",
                object_id=LISTENER,
                accepted_at=1000.0,
                applied_at=applied,
                outcome="runtime" if applied else None,
            )
        )
    port = {
        "id": "p1",
        "network_id": "n",
        "mac": "fa:16:3e:00:00:0b",
        "mtu": 1500,
        "addresses": [{"subnet_id": "s", "address": "198.51.100.11"}],
    }
    connection.execute(
        amphora.insert().values(
            id=AMPHORA,
            load_balancer_id=LB,
            role="single",
            state="ready",
            management_address="203.0.113.11",
            confirmed=7,
            heartbeat_key=b"sealed-key",
            certificate_expires_at=1.8e9,
            created_at=999.0,
            plugged=json.dumps([{"port": port, "subnets": []}]),
        )
    )
    connection.execute(
        amphora.insert().values(
            id=AMPHORA.replace("0b9d", "0b9e"),
            load_balancer_id=OTHER,
            role="single",
            state="booting",
            confirmed=0,
            heartbeat_key=b"sealed-key",
            created_at=998.0,
        )
    )
    connection.execute(amphora_seen.insert().values(amphora_id=AMPHORA, seen_at=time.time() - 5, generation=7))


@pytest.fixture
def run(config_file, amphoractl):
    """Runs a command line on that configuration, or another one."""
    return lambda *words, path=config_file: amphoractl(path, *words)


def test_every_entry_point_of_the_group_is_there(entry_points, resolve):
    names = {name for name, _target in entry_points(COMMANDS)}
    assert names == {
        "loadbalancer_list",
        "loadbalancer_show",
        "loadbalancer_render",
        "loadbalancer_history",
        "amphora_list",
        "amphora_show",
        "work_list",
        "database_status",
        "database_upgrade",
        "secrets_status",
        "secrets_reseal",
    }
    assert all(resolve(target) for _name, target in entry_points(COMMANDS))
    assert ("amphoractl", "amphora_driver.cli.main:main") in entry_points("console_scripts")


def test_loadbalancer_list(run):
    status, out, _err = run("loadbalancer", "list", "-f", "json")
    assert status == 0
    first, second = json.loads(out)
    assert first == {
        "ID": LB,
        "Project": "project",
        "Op": "apply",
        "Wanted": 8,
        "Applied": 7,
        "Dirty": True,
        "Owner": "controller-1",
        "Attempts": 2,
        "Error": "no such interface",
    }
    assert second["ID"] == OTHER
    for words in (("--dirty",), ("--project", "project")):
        assert [one["ID"] for one in json.loads(run("loadbalancer", "list", "-f", "json", *words)[1])] == [LB]
    assert "Applied" in run("loadbalancer", "list")[1]


def test_loadbalancer_show(run):
    shown = json.loads(run("loadbalancer", "show", LB, "-f", "json")[1])
    assert (shown["Topology"], shown["Compute"], shown["Network"]) == ("SINGLE", "netns", "local")
    assert shown["Profile"] == {"timeout_tunnel": 60000}
    assert shown["Objects"] == {"listeners": 1, "loadbalancers": 1}
    assert shown["Amphorae"] == {"ready": 1}
    assert shown["Leased until"] == "2001-09-09T01:46:40+00:00"
    assert shown["Next attempt"] is None
    assert [(one["generation"], one["applied_at"]) for one in shown["Requests"]] == [
        (8, None),
        (7, "1970-01-01T00:16:40.250000+00:00"),
    ]
    table = run("loadbalancer", "show", LB, "--max-width", "0")[1]
    assert "not applied yet" in table
    assert "timeout_tunnel: 60000" in table
    assert "as configured" in run("loadbalancer", "show", OTHER)[1], "one that is removed has no profile left"
    assert "applied after 0.25 s (runtime)" in table
    assert "1 listeners, 1 loadbalancers" in table
    assert len(json.loads(run("loadbalancer", "show", LB, "--requests", "1", "-f", "json")[1])["Requests"]) == 1


def test_loadbalancer_render(run):
    status, out, err = run("loadbalancer", "render", LB)
    assert (status, err) == (0, "")
    assert "198.51.100.5:80" in out


def test_loadbalancer_render_asks_the_configuration(run, config_file):
    config_file.write_text(config_file.read_text() + "[haproxy]\ntimeout_client_data = 1234\n")
    assert "timeout client 1234" in run("loadbalancer", "render", LB)[1]


def test_amphora_list(run):
    rows = json.loads(run("amphora", "list", "-f", "json")[1])
    assert len(rows) == 2
    mine = rows[0]
    assert 5 <= mine.pop("Last heartbeat") < 60
    assert mine == {
        "ID": AMPHORA,
        "Load balancer": LB,
        "Role": "single",
        "State": "ready",
        "Address": "203.0.113.11",
        "Confirmed": 7,
        "Certificate expires": "2027-01-15T08:00:00+00:00",
        "Has VIPs": None,
    }
    assert rows[1]["Last heartbeat"] is None
    table = run("amphora", "list", "--loadbalancer", OTHER)[1]
    assert "never" in table
    assert AMPHORA not in table
    assert "s ago" in run("amphora", "list")[1]


def test_the_amphorae_of_a_pair_say_who_has_the_vips(run, config_file):
    other = AMPHORA.replace("0b9d", "0b9e")
    partners = json.dumps([{"id": other, "address": "198.51.100.12"}])
    database = Database(f"sqlite:///{config_file.parent}/db.sqlite")
    database.write(lambda c: c.execute(amphora_seen.update().values(holds_vip=True)))
    database.write(
        lambda c: c.execute(
            amphora_seen.insert().values(amphora_id=other, seen_at=time.time(), generation=7, holds_vip=False)
        )
    )
    database.write(
        lambda c: c.execute(amphora.update().where(amphora.c.id == AMPHORA).values(role="MASTER", partners=partners))
    )
    database.dispose()
    rows = {row["ID"]: row for row in json.loads(run("amphora", "list", "-f", "json")[1])}
    assert (rows[AMPHORA]["Role"], rows[AMPHORA]["Has VIPs"], rows[other]["Has VIPs"]) == ("MASTER", True, False)
    assert "Has VIPs" in run("amphora", "list")[1]
    shown = json.loads(run("amphora", "show", AMPHORA, "-f", "json")[1])
    assert (shown["Has VIPs"], shown["Partners"]) == (True, json.loads(partners))
    assert f"{other} at 198.51.100.12" in run("amphora", "show", AMPHORA)[1]


@pytest.mark.parametrize("form", ["json", "yaml", "table", "value"])
def test_amphora_show_never_shows_the_key(run, form):
    status, out, _err = run("amphora", "show", AMPHORA, "-f", form)
    assert status == 0
    assert "198.51.100.11" in out
    assert "sealed" not in out
    assert "key" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("loadbalancer", "show"),
        ("loadbalancer", "render"),
        ("loadbalancer", "history"),
        ("amphora", "show"),
    ],
)
def test_what_is_not_recorded_is_said(run, caplog, words):
    status, out, _err = run(*words, "unknown")
    assert (status, out) == (1, "")
    assert "nothing is recorded under this id" in caplog.text


def test_no_database_is_made_by_looking(run, tmp_path, caplog):
    path = tmp_path / "other.conf"
    path.write_text(f"[store]\nconnection = sqlite:///{tmp_path}/none.sqlite\n")
    assert run("amphora", "list", path=path)[0] == 1
    assert "does not exist" in caplog.text
    assert not (tmp_path / "none.sqlite").exists()


def test_a_missing_configuration_file_is_said(run, tmp_path, caplog):
    assert run("amphora", "list", path=tmp_path / "none.conf")[0] == 1
    assert "none.conf" in caplog.text


def test_without_a_command_there_is_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: amphoractl")
