# SPDX-License-Identifier: Apache-2.0
"""Settings of agents: choice of the amphorae, update of those with other settings, failures and old agents."""

import hashlib
import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa
from control import TREE, FakeCloud, controlled
from dataplane.pki import Authority

from amphora_driver import metrics
from amphora_driver.agent.client import BundleState, SettingsState
from amphora_driver.agent.responses import LogLines
from amphora_driver.database.tables import amphora, job
from amphora_driver.errors import AgentRefused, AgentUnreachable, ConfigurationError
from amphora_driver.maintenance import drift_audit
from amphora_driver.maintenance.drift_audit import DriftAuditor
from amphora_driver.maintenance.settings_update import SettingsUpdate, choose_amphorae
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.reconcile.defaults import agent_settings, validate_defaults
from amphora_driver.render.agent_settings import render_agent_settings
from amphora_driver.store import desired_objects
from amphora_driver.store.amphorae import LastHeartbeat, ReachableAmphora, record_heartbeats
from amphora_driver.topology import SingleTopology

MANY = 3
OLD = render_agent_settings(["192.0.2.1:9879"], 3.0, 30.0)


class Agents(FakeCloud):
    """One amphora for each load balancer; agents that keep settings, as far as they know them."""

    roles = SingleTopology.roles
    priorities = SingleTopology.priorities

    def __init__(self):
        super().__init__()
        self.settings = {}
        self.failure = {}
        self.old = set()
        self.without_certificates = set()
        self.queried = []
        self.sent = []
        self.bodies = {}
        self.log_lines = {}

    def bundle_state(self, amphora_id, _address, *, deadline):
        assert deadline.left() <= 5
        self._reach(amphora_id)
        self.queried.append(amphora_id)
        known = None if amphora_id in self.old else self.settings.setdefault(amphora_id, OLD.digest)
        return BundleState(
            generation=1, digest="d", settings_digest=known, log_lines=self.log_lines.get(amphora_id, LogLines())
        )

    def put_settings(self, amphora_id, _address, body, *, deadline):
        assert deadline.left() <= 5
        self._reach(amphora_id)
        self.sent.append(amphora_id)
        if amphora_id in self.failure:
            raise self.failure[amphora_id]
        if amphora_id in self.without_certificates and b"client_certificate" in body:
            raise AgentRefused("change", "logs.admin has a target with other keys than url, authorization", status=400)
        digest = hashlib.sha256(body).hexdigest()
        self.bodies[amphora_id] = json.loads(body)
        self.settings[amphora_id] = digest
        return SettingsState(digest=digest)


@pytest.fixture
def control(tmp_path):
    with controlled(tmp_path, Agents()) as made:
        for number in range(MANY):
            listeners = tuple(
                msgspec.structs.replace(one, id=f"li{number}", loadbalancer_id=f"lb{number}") for one in TREE.listeners
            )
            vip = msgspec.structs.replace(TREE.vip, address=f"198.51.100.{number + 1}", port_id=f"p{number}")
            tree = msgspec.structs.replace(TREE, id=f"lb{number}", vip=vip, listeners=listeners)
            made.recorder.create_load_balancer(tree, read_back=False)
        made.work(100)
        made.conf.set_override("targets", ["192.0.2.2:9879"], "amp_health")
        yield made


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


def update(control):
    return SettingsUpdate(control.reconciler._context)


def ids(control):
    return sorted(control.database.read(lambda c: c.execute(sa.select(amphora.c.id)).scalars().all()))


def wanted(control):
    return agent_settings(control.conf).digest


# -- pure functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("due_at", "most", "chosen"),
    [
        ({}, 9, "abc"),
        ({}, 2, "ab"),
        ({"a": 5.0, "b": 20.0}, 9, "ca"),
        ({"a": 5.0, "b": 4.0}, 2, "cb"),
        ({"a": 10.0, "b": 10.1, "c": 11.0}, 9, "a"),
        ({}, 0, ""),
    ],
)
def test_unknown_amphorae_are_queried_first(due_at, most, chosen):
    ready = [ReachableAmphora(id=one, management_address="203.0.113.9") for one in "abc"]
    assert [one.id for one in choose_amphorae(ready, due_at, 10.0, most)] == [*chosen]


@pytest.mark.parametrize("target", ["health.example:9879", "192.0.2.10", "192.0.2.10:0", "192.0.2.10:x", ""])
def test_an_invalid_target_prevents_the_start(control, target):
    control.conf.set_override("targets", [target], "amp_health")
    with pytest.raises(ConfigurationError, match=r"\[amp_health\] targets"):
        validate_defaults(control.conf)


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_every_agent_gets_changed_settings_once(control, pool):
    made = update(control)
    assert made.run_round(pool) == MANY
    assert control.cloud.settings == dict.fromkeys(ids(control), wanted(control))
    assert made.run_round(pool) == 0
    assert update(control).run_round(pool) == MANY
    assert sorted(control.cloud.sent) == ids(control)


def test_spares_and_amphorae_of_open_jobs_get_settings(control, pool):
    spare, busy, _ = ids(control)

    def write(connection):
        job_of = {one: amphora.c.id == one for one in (spare, busy)}
        for one, values in ((spare, {"op": "spares"}), (busy, {"dirty": True})):
            of = sa.select(amphora.c.load_balancer_id).where(job_of[one]).scalar_subquery()
            connection.execute(job.update().where(job.c.load_balancer_id == of).values(**values))

    control.database.write(write)
    assert update(control).run_round(pool) == MANY
    assert sorted(control.cloud.sent) == ids(control)


def test_amphorae_that_are_not_ready_are_not_queried(control, pool):
    states = dict(zip(ids(control), (AmphoraState.BOOTING, AmphoraState.RETIRING), strict=False))

    def write(connection):
        for one, state in states.items():
            connection.execute(amphora.update().where(amphora.c.id == one).values(state=state.value))

    control.database.write(write)
    assert update(control).run_round(pool) == 1
    assert control.cloud.sent == [ids(control)[2]]


def test_the_number_of_updates_in_a_round_is_limited(control, pool):
    made = update(control)
    made._most = 2
    assert [made.run_round(pool) for _ in range(3)] == [2, 1, 0]


def test_an_old_agent_gets_no_settings(control, pool):
    first, second, third = ids(control)
    control.cloud.old.add(first)
    # The second agent has answered before its version was replaced by an earlier one.
    control.cloud.failure[second] = AgentRefused("change", "it answered 404", status=404)
    made = update(control)
    assert made.run_round(pool) == MANY
    assert sorted(control.cloud.sent) == [second, third]
    assert made.run_round(pool) == 0


@pytest.mark.parametrize(
    "failure",
    [AgentUnreachable("change", "away"), *(AgentRefused("change", "disk full", status=one) for one in (400, 500))],
)
def test_a_failed_update_is_repeated_later(control, pool, caplog, failure):
    caplog.set_level(logging.INFO)
    first = ids(control)[0]
    control.cloud.failure[first] = failure
    made = update(control)
    assert made.run_round(pool) == MANY
    assert f"cannot change the settings of amphora {first}" in caplog.text
    assert made.run_round(pool) == 0, "the update is postponed"
    control.cloud.failure.clear()
    made._due_at[first] = 0.0
    assert made.run_round(pool) == 1
    assert control.cloud.settings[first] == wanted(control)


def test_an_unreachable_agent_stops_no_round(control, pool):
    first = ids(control)[0]
    control.cloud.dead.add(first)
    made = update(control)
    assert made.run_round(pool) == MANY - 1
    assert made.run_round(pool) == 0
    assert first not in control.cloud.sent


def test_a_round_ends_while_an_agent_does_not_answer(control, pool, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(control.cloud, "bundle_state", lambda *_, **__: released.wait(60))
    made, allowed = update(control), iter([True])
    try:
        assert made.run_round(pool, lambda: next(allowed, False)) == 0
        assert made.run_round(pool) == 0, "the running queries are not repeated"
    finally:
        released.set()


# -- log targets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def logging_to(control):
    control.conf.set_override("admin_targets", ["udp://192.0.2.9:514"], "amp_logs")
    control.conf.set_override("tenant_targets", ["tcp://192.0.2.9:601"], "amp_logs")
    yield
    for name in ("admin_targets", "tenant_targets"):
        control.conf.clear_override(name, "amp_logs")


def logs_of(control, amphora_id):
    return control.cloud.bodies[amphora_id].get("logs")


def balancer_of(control, amphora_id):
    query = sa.select(amphora.c.load_balancer_id).where(amphora.c.id == amphora_id)
    return control.database.read(lambda c: c.execute(query).scalar_one())


def with_profile(control, load_balancer_id, **values):
    def write(connection):
        root = desired_objects.load_roots(connection, [load_balancer_id])[load_balancer_id]
        profile = msgspec.structs.replace(root.profile, **values)
        desired_objects.update_objects(connection, 1, [msgspec.structs.replace(root, profile=profile)])

    control.database.write(write)


@pytest.mark.usefixtures("logging_to")
def test_each_amphora_gets_the_log_targets_of_its_load_balancer(control, pool):
    first, second, third = ids(control)
    with_profile(control, balancer_of(control, first), tenant_log_targets=("udp://192.0.2.77:514",))
    with_profile(control, balancer_of(control, second), admin_log_targets=(), tenant_log_targets=())
    made = update(control)
    assert made.run_round(pool) == MANY
    found = logs_of(control, first)
    assert [one["url"] for one in found["admin"] + found["tenant"]] == ["udp://192.0.2.9:514", "udp://192.0.2.77:514"]
    assert found["load_balancer_id"] == balancer_of(control, first)
    assert found["project_id"] == TREE.project_id
    assert logs_of(control, second) is None
    assert logs_of(control, third)["tenant"] == [{"url": "tcp://192.0.2.9:601", "authorization": ""}]
    assert update(control).run_round(pool) == MANY
    assert sorted(control.cloud.sent) == ids(control), "nothing is sent twice"


@pytest.mark.usefixtures("logging_to")
def test_a_spare_gets_other_settings_when_a_load_balancer_takes_it(control, pool):
    first, second, _ = ids(control)
    own, other = balancer_of(control, first), balancer_of(control, second)

    def belongs_to(of):
        control.database.write(
            lambda c: c.execute(amphora.update().where(amphora.c.id == first).values(load_balancer_id=of))
        )

    belongs_to("a-spare-pool")
    made = update(control)
    assert made.run_round(pool) == MANY
    spare = logs_of(control, first)
    assert (spare["load_balancer_id"], spare["project_id"], spare["tenant"]) == ("", "", [])
    belongs_to(other)
    assert made.run_round(pool) == 1, "only this amphora is due"
    assert logs_of(control, first)["load_balancer_id"] == other
    belongs_to(own)


def test_a_restarted_agent_is_queried_at_once(control, pool):
    """After a reboot, the agent has no secrets of log targets, and so other settings."""
    first, second, _ = ids(control)

    def heard(*epochs):
        beats = [
            LastHeartbeat(amphora_id=one, seen_at=1.0, generation=1, epoch=epoch, sequence=1)
            for one, epoch in zip((first, second), epochs, strict=True)
        ]
        control.database.write(lambda connection: record_heartbeats(connection, beats))

    heard(7, 7)
    made = update(control)
    assert made.run_round(pool) == MANY
    control.cloud.queried.clear()
    control.cloud.settings[first] = OLD.digest
    heard(8, 7)
    assert made.run_round(pool) == 1
    assert control.cloud.queried == [first]
    assert control.cloud.settings[first] == wanted(control)
    assert made.run_round(pool) == 0


@pytest.mark.usefixtures("logging_to")
def test_an_agent_without_log_lines_gets_no_log_targets(control, pool):
    first = ids(control)[0]
    control.cloud.log_lines[first] = None
    assert update(control).run_round(pool) == MANY
    assert logs_of(control, first) is None
    assert control.cloud.bodies[first]["heartbeat"]["targets"] == ["192.0.2.2:9879"]


@pytest.mark.usefixtures("logging_to")
def test_a_flavor_whose_ca_certificate_is_gone_is_named(control, pool, caplog):
    first = ids(control)[0]
    with_profile(control, balancer_of(control, first), tenant_log_targets=("tls://192.0.2.77:6514",))
    assert update(control).run_round(pool) == MANY
    assert f"cannot change the settings of amphora {first}" in caplog.text
    assert "needs a CA certificate" in caplog.text
    assert first not in control.cloud.sent


CLIENTS = Authority("log clients")
FORMER, NEW = (CLIENTS.issue(name, number=number) for number, name in enumerate(("former", "new"), start=40))


@pytest.fixture
def shown_certificate(control, tmp_path):
    """Replaces the client certificate of log targets; yields a function that returns what amphorae have."""
    options = {"ca_certificate": tmp_path / "ca.pem", "client_certificate": tmp_path / "client.pem"}
    options["ca_certificate"].write_text(CLIENTS.pem)
    control.conf.set_override("admin_targets", ["tls://192.0.2.9:6514"], "amp_logs")
    for name, path in options.items():
        control.conf.set_override(name, str(path), "amp_logs")

    def write(content):
        (tmp_path / "next.pem").write_text(content)
        (tmp_path / "next.pem").rename(options["client_certificate"])

    write(FORMER.pem)
    yield write
    for name in ("admin_targets", *options):
        control.conf.clear_override(name, "amp_logs")


def certificates_of(control):
    return {logs_of(control, one)["admin"][0]["client_certificate"] for one in ids(control)}


def test_a_new_client_certificate_reaches_all_amphorae_without_a_restart(control, pool, shown_certificate, caplog):
    caplog.set_level(logging.DEBUG)
    made = update(control)
    assert made.run_round(pool) == MANY
    assert certificates_of(control) == {FORMER.certificate_pem + FORMER.key_pem}
    assert made.run_round(pool) == 0
    shown_certificate(NEW.pem)
    assert made.run_round(pool) == MANY, "all amphorae are due at once"
    assert certificates_of(control) == {NEW.certificate_pem + NEW.key_pem}
    assert made.run_round(pool) == 0
    assert "PRIVATE KEY" not in caplog.text


@pytest.mark.parametrize("content", ["", NEW.certificate_pem, NEW.certificate_pem + FORMER.key_pem])
def test_an_unusable_client_certificate_changes_nothing(control, pool, shown_certificate, caplog, content):
    made = update(control)
    assert made.run_round(pool) == MANY
    shown_certificate(content)
    assert made.run_round(pool) == 0
    assert made.run_round(pool) == 0
    assert caplog.text.count("cannot use the files of [amp_logs] and keeps their former content") == 1
    assert certificates_of(control) == {FORMER.certificate_pem + FORMER.key_pem}
    shown_certificate(NEW.pem)
    assert made.run_round(pool) == MANY


def test_an_agent_that_knows_no_client_certificate_gets_the_other_settings(control, pool, shown_certificate, caplog):
    first = ids(control)[0]
    control.cloud.without_certificates.add(first)
    made = update(control)
    assert made.run_round(pool) == MANY
    assert control.cloud.bodies[first]["heartbeat"]["targets"] == ["192.0.2.2:9879"]
    assert logs_of(control, first)["admin"] == [{"url": "tls://192.0.2.9:6514", "authorization": ""}]
    assert logs_of(control, first)["authorities"] == logs_of(control, ids(control)[1])["authorities"] != ""
    assert f"cannot change the settings of amphora {first}" in caplog.text
    assert "does not support the client certificate of log targets: replace the amphora" in caplog.text
    assert control.cloud.sent.count(first) == 2
    assert made.run_round(pool) == 0, "the update is postponed"
    made._due_at[first] = 0.0
    assert made.run_round(pool) == 1
    assert control.cloud.sent.count(first) == 3, "the agent has the settings without the certificate"
    assert caplog.text.count("replace the amphora") == 2
    control.cloud.without_certificates.clear()
    made._due_at[first] = 0.0
    assert made.run_round(pool) == 1
    assert certificates_of(control) == {FORMER.certificate_pem + FORMER.key_pem}


def test_a_file_is_read_again_when_only_its_ctime_changes(control, pool, shown_certificate):
    """`cp --preserve=timestamps` writes into the same inode, and restores the time of the content."""
    path = Path(control.conf.amp_logs.client_certificate)
    size = max(len(FORMER.pem), len(NEW.pem))
    shown_certificate(FORMER.pem.ljust(size, "\n"))
    made, before = update(control), path.stat()
    assert made.run_round(pool) == MANY
    path.write_text(NEW.pem.ljust(size, "\n"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    # The clock of the file system has coarse steps.
    while (after := path.stat()).st_ctime_ns == before.st_ctime_ns:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert made.run_round(pool) == MANY
    assert certificates_of(control) == {NEW.certificate_pem + NEW.key_pem}


def test_lines_of_amphorae_are_metrics(control, pool):
    first = ids(control)[0]

    def counted():
        return [metrics.OURS.log_lines.labels(one)._value.get() for one in metrics.LOG_RESULTS]

    made, before = update(control), counted()
    for sent, lost, more in ((100, 10, (0, 0)), (150, 10, (50, 0)), (30, 7, (80, 7))):
        control.cloud.log_lines[first] = LogLines(sent=sent, lost=lost)
        made._due_at.clear()
        assert made.run_round(pool) == MANY
        assert [now - then for now, then in zip(counted(), before, strict=True)] == [*more]


# -- drift audit -------------------------------------------------------------------------------------------------------


@pytest.fixture
def audits(control, monkeypatch):
    """An auditor for which all load balancers are due in each round."""
    monkeypatch.setattr(
        drift_audit.DriftAuditor, "_expected_digests", lambda _, recorded: {one.id: "d" for one in recorded.amphorae}
    )
    control.conf.set_override("interval", 1.0, "amp_drift")
    control.database.write(lambda c: c.execute(amphora.update().values(confirmed_at=1.0, audited_at=None)))
    made = DriftAuditor(control.reconciler._context, "me", lambda: None)
    made._most, made._round = 4, 1.0
    yield made
    control.conf.clear_override("interval", "amp_drift")


def findings(control):
    rows = control.database.read(lambda c: c.execute(sa.select(amphora.c.id, amphora.c.drifts, amphora.c.drift)).all())
    return {row.id: (row.drifts, row.drift) for row in rows}


def test_the_drift_audit_sends_settings_and_needs_no_second_query(control, audits, pool):
    assert audits.run_round(pool) == MANY
    assert sorted(control.cloud.sent) == ids(control)
    assert findings(control) == dict.fromkeys(ids(control), (False, None))
    assert audits._settings.run_round(pool) == 0


def test_settings_that_an_agent_refuses_are_drift(control, audits, pool):
    first = ids(control)[0]
    control.cloud.failure[first] = AgentRefused("change", "disk full", status=500)
    assert audits.run_round(pool) == MANY
    drifts, words = findings(control)[first]
    assert drifts
    assert words == "settings: it has other heartbeat settings or log targets than configured: disk full"
    dirty = control.database.read(lambda c: c.execute(sa.select(job.c.dirty)).scalars().all())
    assert dirty == [False] * MANY, "a push does not change settings"


@pytest.mark.usefixtures("shown_certificate")
def test_a_missing_client_certificate_is_drift(control, audits, pool):
    first = ids(control)[0]
    control.cloud.without_certificates.add(first)
    for sent in (2, 3):
        assert audits.run_round(pool) == MANY
        words = "settings: its agent does not support the client certificate of log targets: replace the amphora"
        assert findings(control)[first] == (True, words)
        assert control.cloud.sent.count(first) == sent
        control.database.write(lambda c: c.execute(amphora.update().values(audited_at=None)))
