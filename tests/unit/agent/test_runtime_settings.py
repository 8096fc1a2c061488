# SPDX-License-Identifier: Apache-2.0
"""Settings at run time: validation, storage, and their use by the sender of heartbeats and the drift check."""

import dataclasses
import json
import socket
import threading
import uuid
from types import SimpleNamespace

import pytest
from agent_heartbeats import decode

from amphora_agent import config, runtime_settings
from amphora_agent.api.settings import LiveSettings
from amphora_agent.change_priority import ChangePriority
from amphora_agent.config import Settings, Target
from amphora_agent.drift.repair import DriftRepair
from amphora_agent.drift.report import DriftReport
from amphora_agent.errors import MachineError, MalformedSettings, SettingsRefused
from amphora_agent.log_settings import LARGEST_CERTIFICATE, LogSettings, LogTarget
from amphora_agent.paths import Paths
from amphora_agent.runtime_settings import HeartbeatSettings, RuntimeSettings
from amphora_agent.stats.active_sender import ActiveSender
from amphora_agent.stats.heartbeat_sender import HeartbeatSender

AMPHORA = uuid.UUID("a0000000-0000-4000-8000-000000000001")
KEY = b"k" * 32
GOOD = {"heartbeat": {"targets": ["192.0.2.10:9879", "[2001:db8::10]:9879"], "interval": 5}, "audit_interval": 30.5}
OTHER = RuntimeSettings(HeartbeatSettings((Target("192.0.2.1", 1),), 7.0), 8.0)


def settings(*targets, interval=3600.0, heartbeat_format="native"):
    address = ("127.0.0.1", 9443, "supervisor", 20)
    return Settings(AMPHORA, *address, interval, targets, KEY, heartbeat_format, audit_interval=3600.0)


@pytest.fixture
def paths(tmp_path):
    made = Paths(tmp_path)
    for one in (made.etc, made.var):
        one.mkdir(parents=True)
    return made


def changed(key, value):
    document = json.loads(json.dumps(GOOD))
    holder = document["heartbeat"] if key in document["heartbeat"] else document
    holder[key] = value
    return document


# -- the document ------------------------------------------------------------------------------------------------------


def test_a_complete_document_is_read():
    found = runtime_settings.parse(json.dumps(GOOD).encode())
    targets = (Target("192.0.2.10", 9879), Target("2001:db8::10", 9879))
    assert found == RuntimeSettings(HeartbeatSettings(targets, 5.0), 30.5)
    assert runtime_settings.parse(json.dumps(found.to_document()).encode()) == found
    assert found.digest != OTHER.digest
    assert runtime_settings.current(found.applied_to(settings())) == found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 50_000, "not JSON"),
        (b" " * (runtime_settings.LARGEST + 1), "longer than"),
        (b"[]", "not an object"),
        (b"{}", "other keys"),
        (changed("surprise", 1), "other keys"),
        (changed("heartbeat", None), "heartbeat is not an object"),
        (changed("heartbeat", {"targets": []}), "heartbeat has other keys"),
        (changed("targets", "192.0.2.10:9879"), "not a list of strings"),
        (changed("targets", [1]), "not a list of strings"),
        (changed("targets", [""]), "does not end with a port"),
        (changed("targets", ["192.0.2.10"]), "does not end with a port"),
        (changed("targets", ["192.0.2.10:0"]), "does not end with a port"),
        (changed("targets", ["192.0.2.10:65536"]), "does not end with a port"),
        (changed("targets", ["192.0.2.10:-1"]), "does not end with a port"),
        (changed("targets", ["health.example:9879"]), "health.example"),
        (changed("targets", ["192.0.2.10:9879, 192.0.2.11:9879"]), "192.0.2.10:9879, 192.0.2.11"),
        (changed("interval", True), "heartbeat.interval is not a number"),
        (changed("interval", "5"), "heartbeat.interval is not a number"),
        (changed("interval", None), "heartbeat.interval is not a number"),
        (changed("interval", 0), "heartbeat.interval: interval = 0.0"),
        (changed("interval", -1), "heartbeat.interval: interval = -1.0"),
        (changed("interval", float("nan")), "heartbeat.interval: interval = nan"),
        (changed("interval", float("inf")), "heartbeat.interval: interval = inf"),
        (changed("interval", 10**400), "heartbeat.interval: int too large"),
        (changed("audit_interval", 0), "audit_interval: interval = 0.0"),
        (changed("audit_interval", 2e9), "audit_interval: interval = 2000000000.0"),
    ],
)
def test_an_invalid_document_is_refused(body, words):
    with pytest.raises(MalformedSettings, match=words.replace(".", r"\.")):
        runtime_settings.parse(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize(
    "lines",
    ["interval = nan", "interval = inf", "interval = 0", "targets = 192.0.2.10:70000", "targets = 192.0.2.10"],
)
def test_agent_conf_has_the_same_validation(paths, lines):
    text = f"[agent]\namphora_id = {AMPHORA}\nbind_address = 127.0.0.1\n[heartbeat]\n"
    (paths.etc / "heartbeat.key").write_text(KEY.hex())
    (paths.etc / "agent.conf").write_text(text)
    assert config.load(paths).interval == 3.0
    (paths.etc / "agent.conf").write_text(f"{text}{lines}\n")
    with pytest.raises(config.SettingsError):
        config.load(paths)


# -- storage -----------------------------------------------------------------------------------------------------------


def test_stored_settings_replace_those_of_agent_conf(paths):
    before = settings(Target("192.0.2.9", 9))
    assert runtime_settings.stored(before, paths) == before
    runtime_settings.keep(OTHER, paths)
    after = runtime_settings.stored(before, paths)
    assert runtime_settings.current(after) == OTHER
    assert dataclasses.replace(after, targets=before.targets, interval=3600.0, audit_interval=3600.0) == before


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00"])
def test_unreadable_stored_settings_are_ignored(paths, content, caplog):
    paths.settings.write_bytes(content)
    assert runtime_settings.stored(settings(), paths) == settings()
    assert "settings.json" in caplog.text


def test_settings_that_cannot_be_stored_are_not_used(paths):
    paths.settings.mkdir()
    live, sender, repair = made_live(paths, settings())
    with pytest.raises(MachineError, match="store the settings"):
        live.change(OTHER)
    assert (live.current().heartbeat.targets, sender.settings) == ((), settings())
    assert repair._interval == 3600.0


SHOWN = "-----BEGIN CERTIFICATE-----\n-----BEGIN PRIVATE KEY-----\nkey of the amphora\n"
LOGS = LogSettings(
    (LogTarget("udp://192.0.2.9:514"), LogTarget("tls://192.0.2.9:6514", "", SHOWN)),
    (LogTarget("https://192.0.2.9:8443/", "Bearer s", SHOWN),),
    "pem",
)
LOGGED = dataclasses.replace(OTHER, logs=LOGS)


def test_secrets_of_targets_are_never_stored_on_the_disk(paths):
    paths.run.mkdir(parents=True)
    runtime_settings.keep(LOGGED, paths)
    assert "Bearer" not in paths.settings.read_text()
    assert "BEGIN" not in paths.settings.read_text()
    assert runtime_settings.current(runtime_settings.stored(settings(), paths)) == LOGGED
    paths.log_settings.unlink()
    after_reboot = runtime_settings.current(runtime_settings.stored(settings(), paths))
    assert [one.url for one in after_reboot.logs.tenant] == ["https://192.0.2.9:8443/"]
    assert [one.has_secrets for one in (*after_reboot.logs.admin, *after_reboot.logs.tenant)] == [False] * 3
    assert after_reboot.digest != LOGGED.digest, "a controller sends the settings again"


def test_settings_without_secrets_replace_those_with_secrets(paths):
    paths.run.mkdir(parents=True)
    runtime_settings.keep(LOGGED, paths)
    runtime_settings.keep(OTHER, paths)
    assert runtime_settings.current(runtime_settings.stored(settings(), paths)) == OTHER


def test_the_largest_valid_log_settings_are_accepted():
    secret = '"' * 4096
    path = "x" * 1023
    certificate = "-----BEGIN".ljust(LARGEST_CERTIFICATE, '"')
    addresses = [f"https://192.0.2.{number}:65535/{path}" for number in range(251, 255)]
    four = tuple(LogTarget(one, secret, certificate) for one in addresses)
    logs = LogSettings(four, four, "x\n" * (24 << 10), project_id='"' * 255, load_balancer_id='"' * 255)
    document = json.dumps(dataclasses.replace(OTHER, logs=logs).to_document())
    assert runtime_settings.parse(document.encode()).logs == logs


def test_no_representation_shows_a_secret():
    for shown in (repr(LOGGED), json.dumps(LOGGED.to_document(hidden="***"))):
        assert "Bearer" not in shown
        assert "BEGIN" not in shown
    targets = LOGGED.to_document(hidden="***")["logs"]["admin"]
    assert [one.get("client_certificate") for one in targets] == [None, "***"]


@pytest.mark.parametrize(
    ("url", "certificate", "words"),
    [
        ("udp://192.0.2.9:514", SHOWN, "which is not tls or https"),
        ("tcp://192.0.2.9:601", SHOWN, "which is not tls or https"),
        ("tls://192.0.2.9:6514", "no certificate", "is not PEM"),
        ("tls://192.0.2.9:6514", SHOWN + "\xe4", "is not PEM"),
        ("tls://192.0.2.9:6514", SHOWN.ljust(LARGEST_CERTIFICATE + 1), "is not PEM of at most"),
    ],
)
def test_an_invalid_client_certificate_is_refused_without_its_content(url, certificate, words):
    logs = LogSettings((LogTarget(url, "", certificate),), (), "pem")
    with pytest.raises(MalformedSettings, match=words) as caught:
        runtime_settings.parse(json.dumps(dataclasses.replace(OTHER, logs=logs).to_document()).encode())
    assert "key of the amphora" not in str(caught.value)


# -- use ---------------------------------------------------------------------------------------------------------------


class Collector:
    """A collector without HAProxy."""

    is_large = False
    priority = ChangePriority()
    pause = 0.0

    def sample(self, _work=None):
        pass

    def statuses(self):
        return {}

    def document(self, generation):
        return {"generation": generation, "listeners": {}, "pools": {}}

    def write(self, _work=None):
        pass


def made_live(paths, present):
    def make(wanted):
        return HeartbeatSender(wanted, paths, Collector(), lambda: 1, lambda: None, dict)

    sender = ActiveSender(present, make)
    repair = DriftRepair(SimpleNamespace(differences=lambda: None), DriftReport(), 3600.0, lambda: None)
    return LiveSettings(paths, sender, repair, SimpleNamespace(use=lambda _: None)), sender, repair


@pytest.fixture
def receivers():
    opened = [socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6)]
    for one, host in zip(opened, ("127.0.0.1", "::1"), strict=True):
        one.bind((host, 0))
        one.settimeout(10)
    yield opened
    for one in opened:
        one.close()


def target(opened):
    return Target(*opened.getsockname()[:2])


def test_new_targets_continue_the_sequence(paths, receivers):
    old, new = receivers
    live, sender, _ = made_live(paths, settings(target(old)))
    sender.start()
    try:
        first = decode(old.recv(65536), KEY)
        assert first.sequence == 1
        live.change(RuntimeSettings(HeartbeatSettings((target(new),), 0.02), 3600.0))
        # The former interval is one hour: the change itself causes the first heartbeat.
        found = [decode(new.recv(65536), KEY) for _ in range(3)]
        assert [(one.epoch, one.sequence) for one in found] == [(first.epoch, number) for number in (2, 3, 4)]
        assert runtime_settings.stored(settings(), paths).targets == (target(new),)
        old.setblocking(False)
        with pytest.raises(BlockingIOError):
            old.recv(65536)
    finally:
        sender._sender.close()


def test_errors_of_former_targets_are_forgotten(paths, receivers):
    live, sender, _ = made_live(paths, settings(Target("255.255.255.255", 9), target(receivers[0])))
    sender.start()
    try:
        receivers[0].recv(65536)
        assert [*sender.errors()] == ["255.255.255.255:9"]
        live.change(RuntimeSettings(HeartbeatSettings((target(receivers[0]),), 3600.0), 3600.0))
        assert sender.errors() == {}
    finally:
        sender._sender.close()


def test_octavias_worker_keeps_its_heartbeats(paths):
    present = settings(Target("192.0.2.9", 9), heartbeat_format="octavia")
    live, sender, _ = made_live(paths, present)
    with pytest.raises(SettingsRefused, match=r"PUT /1\.0/config"):
        live.change(OTHER)
    assert sender.settings == present
    assert not paths.settings.exists()


def test_equal_settings_are_not_written(paths):
    live, _, _ = made_live(paths, settings())
    live.change(live.current())
    assert not paths.settings.exists()


def test_a_new_check_interval_ends_a_longer_pause():
    checked = threading.Event()
    checker = SimpleNamespace(differences=checked.set, generation=1)
    repair = DriftRepair(checker, DriftReport(), 3600.0, lambda: None)
    repair.start()
    assert not checked.is_set()
    repair.set_interval(0.01)
    assert checked.wait(30)
    repair.set_interval(3600.0)
