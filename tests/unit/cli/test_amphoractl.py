# SPDX-License-Identifier: Apache-2.0
"""The operator's commands with a real database and the entry points of setup.cfg."""

from __future__ import annotations

import json
import time

import migrated
import pytest

from amphora_driver.cli.main import COMMANDS, main
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, amphora_heartbeat, job, object_status, request
from amphora_driver.database.tables_fleet import failover, silent_amphora
from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Profile, Vip
from amphora_driver.store import desired_objects

LB = "52cf0000-0000-4000-8000-000000000001"
OTHER = "52cf0000-0000-4000-8000-000000000002"
LISTENER = "11500000-0000-4000-8000-000000000001"
AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
POOL = "77770000-0000-4000-8000-000000000003"
SPARE = "0b9f0000-0000-4000-8000-000000000001"


@pytest.fixture
def config_file(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    database = Database(url)
    database.write(fill)
    database.dispose()
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {url}\n")
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
    desired_objects.insert_objects(connection, LB, 8, list(desired_objects.iter_subtree(tree)))
    for lb, project, dirty in ((LB, "project", True), (OTHER, "another", False)):
        connection.execute(
            job.insert().values(
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
    seen = {"seen_at": time.time() - 5, "generation": 7, "agent_version": "0.1.0"}
    connection.execute(amphora_heartbeat.insert().values(amphora_id=AMPHORA, **seen))
    fill_events(connection)


def fill_events(connection):
    """Insert a pool with one spare, an open fail-over, a mute amphora, and reports for Octavia."""
    connection.execute(job.insert().values(load_balancer_id=POOL, op="spares", generation=1, dirty=True))
    spare = {"id": SPARE, "load_balancer_id": POOL, "role": "SPARE", "state": "ready", "heartbeat_key": b"sealed-key"}
    connection.execute(amphora.insert().values(created_at=1.0, **spare))
    connection.execute(
        failover.insert().values(load_balancer_id=LB, amphora_id=AMPHORA, cause="silent", begun_at=1001.0)
    )
    silent = {"amphora_id": AMPHORA, "load_balancer_id": LB, "kind": "mute", "since": 1000.0}
    connection.execute(silent_amphora.insert().values(**silent, verdict="its agent answers"))
    said = {"object_id": LB, "kind": "loadbalancers", "load_balancer_id": LB, "provisioning": "ACTIVE"}
    more = {"operating": "ONLINE", "reason": "two members are down", "pending": 8, "version": 2, "reported": 2}
    connection.execute(object_status.insert().values(**said, **more))
    connection.execute(amphora.update().where(amphora.c.id == AMPHORA).values(image="debian-12", drift="routes"))


@pytest.fixture
def database(config_file):
    made = Database(f"sqlite:///{config_file.parent}/db.sqlite")
    yield made
    made.dispose()


@pytest.fixture
def run(config_file, amphoractl):
    """Return a function that runs a command line with this configuration, or another one."""
    return lambda *words, path=config_file: amphoractl(path, *words)


def test_every_entry_point_of_the_group_resolves(entry_points, resolve):
    """Each command of setup.cfg resolves and has a help line."""
    commands = entry_points(COMMANDS)
    assert {name for name, _target in commands} >= {"loadbalancer_list", "status_check", "database_upgrade"}
    assert all((resolve(target).__doc__ or "").strip() for _name, target in commands)
    assert ("amphoractl", "amphora_driver.cli.main:main") in entry_points("console_scripts")


def test_loadbalancer_list(run):
    status, out, _err = run("loadbalancer", "list", "-f", "json")
    assert status == 0
    first, second = json.loads(out)
    assert 5 <= first.pop("Last heartbeat") < 60
    assert first == {
        "ID": LB,
        "Name": "web",
        "Project": "project",
        "Topology": "SINGLE",
        "Provisioning": "PENDING_UPDATE",
        "Operating": "ONLINE",
        "Wanted": 8,
        "Applied": 7,
        "Amphorae": {"ready": 1, "silent": 1},
        "Has VIPs": AMPHORA,
        "Waits for": "Octavia's commit",
        "Attempts": 2,
        "Error": "no such interface",
        "Fail-over": ["silent"],
    }
    assert second["ID"] == OTHER
    assert (second["Provisioning"], second["Name"], second["Amphorae"]) == ("unknown", None, {"booting": 1})
    assert POOL not in out, "a pool of spares is no load balancer"
    assert "Applied" in run("loadbalancer", "list")[1]


def test_loadbalancer_list_long(run):
    first, second = json.loads(run("loadbalancer", "list", "--long", "-f", "json")[1])
    assert first["VIPs"] == ["198.51.100.5"]
    assert first["Reason"] == "two members are down"
    assert first["Pending since"] > 1e6
    assert (first["Owner"], first["Op"], first["Dirty"], first["Drift"]) == ("controller-1", "apply", True, ["routes"])
    assert (second["VIPs"], second["Pending since"], second["Dirty"]) == ([], None, False)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--unfinished",), [LB]),
        (("--project", "project"), [LB]),
        (("--status", "PENDING"), [LB]),
        (("--status", "pending_update", "--status", "unknown"), [LB, OTHER]),
        (("--status", "ONLINE"), [LB]),
        (("--status", "ERROR"), []),
        (("--stale",), []),
    ],
)
def test_loadbalancer_list_is_filtered(run, words, found):
    assert [one["ID"] for one in json.loads(run("loadbalancer", "list", "-f", "json", *words)[1])] == found


def test_silent_amphorae_are_stale(run, database):
    database.write(lambda c: c.execute(amphora_heartbeat.update().values(seen_at=time.time() - 60)))
    assert [one["ID"] for one in json.loads(run("loadbalancer", "list", "--stale", "-f", "json")[1])] == [LB]
    assert [one["ID"] for one in json.loads(run("amphora", "list", "--stale", "-f", "json")[1])] == [AMPHORA]
    database.write(lambda c: c.execute(amphora_heartbeat.delete()))
    assert [one["ID"] for one in json.loads(run("amphora", "list", "--stale", "-f", "json")[1])] == [AMPHORA]


def test_loadbalancer_show(run):
    shown = json.loads(run("loadbalancer", "show", LB, "-f", "json")[1])
    assert set(shown) == {
        *("ID", "Name", "Project", "Topology", "Provisioning", "Operating", "Wanted", "Applied", "Amphorae"),
        *("Has VIPs", "Last heartbeat", "Waits for", "Attempts", "Error", "Reason", "VIPs", "Pending since"),
        *("Next attempt", "Owner", "Op", "Dirty", "Status since", "Committed", "Epoch", "Leased until"),
        *("Objects pending", "To report", "Compute", "Network", "Profile", "Spare pool", "Objects", "Fail-overs"),
        *("Reasons", "Requests"),
    }
    assert (shown["Topology"], shown["Compute"], shown["Network"]) == ("SINGLE", "netns", "local")
    assert shown["Profile"] == {"timeout_tunnel": 60000}
    assert shown["Objects"] == {"listeners": 1, "loadbalancers": 1}
    (machine,) = shown["Amphorae"]
    assert (machine["id"], machine["confirmed"], machine["heard"], machine["has_vips"]) == (AMPHORA, 7, 7, True)
    assert (machine["silent"], machine["verdict"]) == ("mute", "its agent answers")
    assert machine["certificate_expires_at"] == "2027-01-15T08:00:00+00:00"
    (reason,) = shown["Reasons"]
    assert (reason["kind"], reason["id"], reason["provisioning"]) == ("loadbalancer", LB, "PENDING_UPDATE")
    assert reason["reason"].startswith("the change waits for Octavia's commit; two members are down; last error")
    (failover,) = shown["Fail-overs"]
    assert (failover["cause"], failover["begun_at"]) == ("silent", "1970-01-01T00:16:41+00:00")
    assert shown["Leased until"] == "2001-09-09T01:46:40+00:00"
    assert [(one["generation"], one["applied_at"]) for one in shown["Requests"]] == [
        (8, None),
        (7, "1970-01-01T00:16:40.250000+00:00"),
    ]
    assert len(json.loads(run("loadbalancer", "show", LB, "--requests", "1", "-f", "json")[1])["Requests"]) == 1


def test_loadbalancer_show_as_a_table(run):
    table = run("loadbalancer", "show", LB, "--max-width", "0")[1]
    for words in (
        "not applied yet",
        "timeout_tunnel: 60000",
        "applied after 0.25 s (runtime)",
        "1 listeners, 1 loadbalancers",
        f"{AMPHORA} single ready, had the VIPs, confirmed 7, last heartbeat ",
        "silent: mute, verdict: its agent answers, last drift: routes",
        "1: silent, begun",
        f"loadbalancer {LB} PENDING_UPDATE, ONLINE: the change waits for Octavia's commit; two members are down",
    ):
        assert words in table
    assert "as configured" in run("loadbalancer", "show", OTHER)[1], "a removed load balancer has no profile"


def test_loadbalancer_render(run):
    status, out, err = run("loadbalancer", "render", LB)
    assert (status, err) == (0, "")
    assert "198.51.100.5:80" in out


def test_loadbalancer_render_uses_the_configuration(run, config_file):
    config_file.write_text(config_file.read_text() + "[amp_haproxy]\ntimeout_client_data = 1234\n")
    assert "timeout client 1234" in run("loadbalancer", "render", LB)[1]


def test_amphora_list(run):
    rows = json.loads(run("amphora", "list", "-f", "json")[1])
    assert len(rows) == 2, "a spare has no load balancer"
    mine = rows[0]
    assert 5 <= mine.pop("Last heartbeat") < 60
    assert mine == {
        "ID": AMPHORA,
        "Load balancer": LB,
        "Role": "single",
        "State": "ready",
        "Address": "203.0.113.11",
        "Wanted": 8,
        "Confirmed": 7,
        "Reported generation": 7,
        "Silent": "mute",
        "Certificate expires": "2027-01-15T08:00:00+00:00",
        "Has VIPs": None,
        "Image": "debian-12",
        "Agent version": "0.1.0",
        "Drift": "routes",
    }
    assert rows[1]["Last heartbeat"] is None
    table = run("amphora", "list", "--loadbalancer", OTHER)[1]
    assert "never" in table
    assert AMPHORA not in table
    assert "s ago" in run("amphora", "list")[1]
    assert [one["ID"] for one in json.loads(run("amphora", "list", "--status", "READY", "-f", "json")[1])] == [AMPHORA]
    assert len(json.loads(run("amphora", "list", "--project", "another", "-f", "json")[1])) == 1


def test_amphora_show_prints_a_spare(run):
    shown = json.loads(run("amphora", "show", SPARE[:8], "-f", "json")[1])
    assert (shown["ID"], shown["Role"], shown["Load balancer"]) == (SPARE, "SPARE", POOL)


def test_amphora_show_names_the_vip_holder_of_a_pair(run, config_file):
    other = AMPHORA.replace("0b9d", "0b9e")
    partners = json.dumps([{"id": other, "address": "198.51.100.12"}])
    database = Database(f"sqlite:///{config_file.parent}/db.sqlite")
    database.write(lambda c: c.execute(amphora_heartbeat.update().values(holds_vip=True)))
    database.write(
        lambda c: c.execute(
            amphora_heartbeat.insert().values(amphora_id=other, seen_at=time.time(), generation=7, holds_vip=False)
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
def test_missing_records_are_reported(run, caplog, words):
    status, out, _err = run(*words, "unknown")
    assert (status, out) == (1, "")
    assert "nothing is recorded under this id" in caplog.text


def test_a_read_command_creates_no_database(run, tmp_path, caplog):
    path = tmp_path / "other.conf"
    path.write_text(f"[amp_database]\nconnection = sqlite:///{tmp_path}/none.sqlite\n")
    assert run("amphora", "list", path=path)[0] == 1
    assert "does not exist" in caplog.text
    assert not (tmp_path / "none.sqlite").exists()


def test_a_missing_configuration_file_is_reported(run, tmp_path, caplog):
    assert run("amphora", "list", path=tmp_path / "none.conf")[0] == 1
    assert "none.conf" in caplog.text


def test_without_a_command_amphoractl_prints_help(capsys):
    main([])
    assert capsys.readouterr().out.startswith("usage: amphoractl")
