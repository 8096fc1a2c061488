# SPDX-License-Identifier: Apache-2.0
"""The controller: worker threads, leases, shutdown and the status page, with a cloud in memory."""

import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from free_ports import free_ports
from memory_cloud import OUTAGE, MemoryCloud

from amphora_cluster import config
from amphora_cluster.controller.service import Controller
from amphora_cluster.database.tables import SCHEMA, group_row, node_row, process_row
from amphora_cluster.model import NodeState, Request, RequestKind
from amphora_driver.database import schema_check
from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError

SECONDS = 30.0
DOCUMENT = Path(__file__).parents[3] / "docs/reference/metrics.md"


def until(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


@pytest.fixture
def stores(sqlite_cluster, make_stores, tmp_path):
    made = make_stores(sqlite_cluster)
    key = Fernet.generate_key()
    made.vault = made.groups._vault = made.tokens._vault = Vault([key])
    (tmp_path / "keys").write_bytes(key)
    (tmp_path / "keys").chmod(0o600)
    return made


class Clouds:
    """One cloud in memory for each group."""

    def __init__(self):
        self.by_group, self.changed = {}, []

    def __getitem__(self, name):
        return self.by_group.setdefault(name, MemoryCloud())

    def get(self, group, _credential):
        return self[group.id]

    def servers_changed(self, project_ids):
        self.changed.append(project_ids)


@pytest.fixture
def clouds():
    return Clouds()


@pytest.fixture
def start(stores, clouds, tmp_path):
    """Return a function that starts a controller with some options."""
    running = []

    def start(**options):
        values = {"poll_interval": 0.2, "status_port": 0, "retry_first": 0.1, "lease": 5.0, **options}
        lines = "".join(f"{name} = {value}\n" for name, value in values.items())
        text = f"[amp_cluster]\nconnection = {stores.database.url}\nencryption_key_file = {tmp_path}/keys\n"
        (tmp_path / "cluster.conf").write_text(f"{text}lock_dir = {tmp_path}/locks\n{lines}")
        made = Controller(config.load([str(tmp_path / "cluster.conf")]), clouds)
        thread = threading.Thread(target=made.run)
        thread.start()
        running.append((made, thread))
        return made

    yield start
    for made, _ in running:
        made.stop()
    for _, thread in running:
        thread.join(SECONDS)
        assert not thread.is_alive()


def states(stores, name="g1"):
    return {node.server_id: node.state for node in stores.groups.list_nodes(name)}


def owners(stores):
    return set(stores.database.read(lambda c: c.execute(sa.select(group_row.c.owner)).scalars().all()))


def test_a_group_is_polled_without_an_event(stores, clouds, start):
    stores.add()
    start()
    until(lambda: len(clouds["g1"].calls) > 2)
    clouds["g1"].boot("a")
    # The state JOINING is recorded before the member is created.
    until(lambda: clouds["g1"].served() == ["a"])
    clouds["g1"].check()
    until(lambda: states(stores) == {"a": NodeState.SERVING})


def test_a_controller_is_registered_while_it_runs(stores, start, monkeypatch):
    def registered():
        return stores.database.read(lambda c: c.execute(sa.select(process_row)).all())

    monkeypatch.setattr(f"{Controller.__module__}.HEARTBEAT_INTERVAL", 0.1)
    made = [start(), start()]
    until(lambda: len(registered()) == 2)
    assert {row.revision for row in registered()} == {schema_check.known_revisions(SCHEMA)[-1]}
    begun = max(row.seen_at for row in registered())
    until(lambda: max(row.seen_at for row in registered()) > begun)
    for one in made:
        one.stop()
        assert one.wait(SECONDS)
    assert registered() == []


def test_a_request_is_carried_out_before_the_next_poll(stores, clouds, start):
    clouds["g1"].boot("a", "b")
    stores.add(drain_seconds=0)
    start(poll_interval=1000)
    until(lambda: clouds["g1"].served() == ["a", "b"])
    clouds["g1"].check()
    until(lambda: set(states(stores).values()) == {NodeState.SERVING})
    made = stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.LEAVE, servers=("a",)))
    until(lambda: stores.requests.get("g1", made.id).ended_at is not None)
    assert clouds["g1"].served() == ["b"]


@pytest.mark.parametrize(("table", "column"), [(group_row, "id"), (node_row, "group_id")])
def test_a_group_with_an_unreadable_record_does_not_delay_others(stores, clouds, start, table, column):
    for name in ("g1", "g2"):
        stores.add(name)
        clouds[name].boot(name)
    node = {"group_id": "g1", "server_id": "a", "state": "new", "since": 1.0, "body": "{}"}
    stores.database.write(lambda c: c.execute(node_row.insert().values(**node)))
    broken = table.update().where(table.c[column] == "g1").values(body='{"state": "of a newer version"}')
    stores.database.write(lambda c: c.execute(broken))
    start()
    until(lambda: clouds["g2"].served() == ["g2"])
    errors = sa.select(group_row.c.error).where(group_row.c.id == "g1")
    until(lambda: "is not valid" in (stores.database.read(lambda c: c.execute(errors).scalar()) or ""))
    assert clouds["g1"].calls == []


def test_groups_that_fail_or_hang_do_not_delay_others(stores, clouds, start):
    names = [f"g{number}" for number in range(6)]
    for name in names:
        stores.add(name)
    hang = threading.Event()
    # Two groups hang in every pass, two fail in every pass. Four threads, so two are for failed groups at most.
    for name in names[:2]:
        clouds[name].servers = lambda *_, **__: (hang.wait(SECONDS), (_ for _ in ()).throw(OUTAGE))
    for name in names[2:4]:
        clouds[name].faults = {"servers": OUTAGE}
    stores.database.write(
        lambda c: c.execute(group_row.update().where(group_row.c.id.in_(names[:4])).values(attempts=3))
    )
    try:
        start(threads=4, retry_most=0.1)
        before = {name: len(clouds[name].calls) for name in names[4:]}
        until(lambda: all(len(clouds[name].calls) > before[name] + 10 for name in names[4:]))
        running = stores.database.read(
            lambda c: c.execute(sa.select(group_row.c.id).where(group_row.c.owner.is_not(None))).scalars().all()
        )
        assert len(set(running) & set(names[:4])) <= 2
    finally:
        hang.set()


def test_a_long_pass_keeps_its_lease(stores, clouds, start):
    stores.add()
    entered, leave = threading.Event(), threading.Event()

    def slow(*_, **__):
        entered.set()
        leave.wait(SECONDS)
        return ()

    clouds["g1"].servers = slow
    start(lease=1.0)
    assert entered.wait(SECONDS)
    query = sa.select(group_row.c.leased_until)
    first = stores.database.read(lambda c: c.execute(query).scalar())
    until(lambda: stores.database.read(lambda c: c.execute(query).scalar()) > first)
    leave.set()
    until(lambda: stores.groups.get("g1").passed_at is not None)
    assert stores.groups.get("g1").attempts == 0


def test_a_stopping_controller_returns_its_leases(stores, clouds, start):
    for name in ("g1", "g2"):
        stores.add(name)
    entered, leave = threading.Event(), threading.Event()

    def slow(*_, **__):
        entered.set()
        leave.wait(SECONDS)
        return ()

    clouds["g1"].servers = slow
    made = start()
    assert entered.wait(SECONDS)
    until(lambda: stores.groups.get("g2").passed_at is not None)
    made.stop()
    calls = len(clouds["g2"].calls)
    leave.set()
    assert made.wait(SECONDS)
    assert owners(stores) == {None}
    assert stores.groups.get("g1").passed_at is not None, "the running pass has ended"
    assert len(clouds["g2"].calls) <= calls + 2, "the search that ran at the stop may have started one pass"


def test_leases_of_a_dead_controller_are_taken_over_at_once(stores, clouds, start, tmp_path):
    stores.add()
    values = {"owner": "dead:1:x", "epoch": 4, "leased_until": stores.database.now() + 1000}
    stores.database.write(lambda c: c.execute(group_row.update().values(**values)))
    start()
    until(lambda: any((tmp_path / "locks").glob("*.lives")))
    (mine,) = (tmp_path / "locks").glob("*.lives")
    suffix = mine.name[mine.name.rindex(".", 0, -len(".lives")) :]
    (tmp_path / "locks" / f"dead:1:x{suffix}").write_bytes(b"")
    until(lambda: stores.groups.get("g1").passed_at is not None)


def test_a_database_that_does_not_answer_ends_no_thread(stores, clouds, start, monkeypatch):
    stores.add()
    made = start()
    until(lambda: clouds["g1"].calls)
    failing = {"left": 3}
    claim = made._claims.claim

    def fail(*words, **more):
        if failing["left"]:
            failing["left"] -= 1
            raise (StoreError("claim", "no answer") if failing["left"] else KeyError("unexpected"))
        return claim(*words, **more)

    monkeypatch.setattr("amphora_cluster.controller.service._ERROR_BACKOFF", 0.05)
    monkeypatch.setattr(made._claims, "claim", fail)
    until(lambda: not failing["left"])
    calls = len(clouds["g1"].calls)
    until(lambda: len(clouds["g1"].calls) > calls + 4)
    assert made._is_healthy()


def test_old_requests_are_deleted(stores, clouds, start, monkeypatch):
    stores.add()
    made = stores.requests.add(Request(id="", group_id="g1", kind=RequestKind.LEAVE, servers=("gone",)))
    monkeypatch.setattr("amphora_cluster.controller.service._PURGE_EVERY", 0.1)
    start(request_retention=60)
    until(lambda: stores.requests.get("g1", made.id).ended_at is not None)
    old = sa.text("UPDATE cluster_request SET ended_at = 1.0")
    stores.database.write(lambda c: c.execute(old))
    until(lambda: stores.requests.list_requests("g1", 9) == ())


def test_a_jump_of_the_clock_deletes_no_nonce_too_early_and_delays_no_other(stores, clouds, start, monkeypatch):
    stores.add()
    token = stores.tokens.create("g1", "test", "test")[0].id
    made, now = start(), stores.database.now
    made._purge()
    assert stores.tokens.use_nonce(token, "expired" * 2, -1.0)
    assert stores.tokens.use_nonce(token, "valid" * 3, 600.0)
    monkeypatch.setattr(made._purge_clock, "_now", lambda: now() + 3600.0)
    made._purge()
    assert stores.tokens.use_nonce(token, "expired" * 2, 1.0), "it was deleted although the clock jumped"
    assert not stores.tokens.use_nonce(token, "valid" * 3, 1.0), "the clock may be set back"


def test_notifications_make_groups_of_server_and_project_due(stores, clouds, start):
    clouds["g1"].boot("a")
    stores.add("g1", project_id="p1")
    stores.add("g2", project_id="p2")
    stores.add("g3", project_id="p3")
    made = start(poll_interval=1000)
    # The state JOINING is recorded before the member is created.
    until(lambda: clouds["g1"].served() == ["a"])
    clouds["g1"].check()
    until(lambda: states(stores) == {"a": NodeState.SERVING})
    until(lambda: stores.groups.get("g3").passed_at is not None)
    before = {name: len(clouds[name].calls) for name in ("g1", "g2", "g3")}
    made._on_servers({"a": "p2"})
    until(lambda: all(len(clouds[name].calls) > before[name] for name in ("g1", "g2")))
    assert len(clouds["g3"].calls) == before["g3"]
    assert clouds.changed == [{"p2"}]


def test_the_status_page_shows_health_and_metrics(stores, clouds, start):
    clouds["g1"].boot("a")
    stores.add()
    stores.add("g2")
    clouds["g2"].faults = {"servers": OUTAGE}
    made = start(status_port=free_ports(1)[0])
    assert made._status.server.wait_until_listening(SECONDS)
    until(lambda: states(stores) == {"a": NodeState.JOINING} and stores.groups.get("g2").error)
    url = f"http://127.0.0.1:{made._status.server.port}"
    with urllib.request.urlopen(f"{url}/healthz", timeout=SECONDS) as answer:
        assert answer.read() == b"ok\n"
    with urllib.request.urlopen(f"{url}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    assert 'amphora_cluster_nodes{state="joining"} 1.0' in text
    assert "amphora_cluster_groups 2.0" in text
    assert "amphora_cluster_failing_groups 1.0" in text
    assert 'amphora_cluster_steps_total{kind="join"}' in text
    assert 'amphora_database_seconds_count{kind="read"}' in text
    names = {
        re.sub(r"_(bucket|count|sum)$", "", one) for one in re.findall(r"^(amphora_cluster_\w+)", text, re.MULTILINE)
    }
    rows = re.findall(r"^\| `(amphora_cluster_\w+)", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert names == set(rows)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}/", timeout=SECONDS)
    made._status._is_working = lambda: False
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}/healthz", timeout=SECONDS)
