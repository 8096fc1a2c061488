# SPDX-License-Identifier: Apache-2.0
"""amphoractl through the status page: the same output as with the database, without database, key or configuration."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address

import migrated
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from test_amphoractl import AMPHORA, LB, POOL, SPARE, fill

from amphora_driver import config
from amphora_driver.cli.main import COMMANDS
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import duty, job, object_status, request
from amphora_driver.database.tables_fleet import (
    certificate_authority,
    circuit_breaker,
    drained_host,
    failover_event,
    process,
    resync,
    unknown_amphora,
)
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry.http_server import Telemetry

TOKEN = "canary-of-the-token"
# Commands that the read-only mode has, with arguments.
COMMAND_LINES = {
    "loadbalancer_list": ("--long",),
    "loadbalancer_show": (LB,),
    "loadbalancer_history": (LB[:-1] + "1",),
    "amphora_list": (),
    "amphora_show": (AMPHORA[:6],),
    "failover_list": ("--loadbalancer", LB),
    "failover_show": ("1",),
    "failover_status": (),
    "unknown-amphora_list": (),
    "spare_list": (),
    "controller_list": ("--all",),
    "job_list": (),
    "status_check": ("--problems",),
}
# These lines of `status check` describe the present host.
HOST_CHECKS = {
    *("Local sockets", "Broker", "Octavia's providers", "Database", "Keys", "Backends", "Octavia's sockets"),
    *("Certificate authorities", "Recorded authorities", "Status page", "Log targets"),
}


def fill_more(connection):
    """Insert rows of the tables that `fill` leaves empty."""
    now = time.time()
    for number, kind in enumerate(("controller", "health-manager", "provider-agent")):
        row = {"name": f"h:{number}:x", "kind": kind, "host": "h", "version": "0.0.1", "started_at": now - 60}
        # The processes must not die between two reads.
        connection.execute(process.insert().values(**row, seen_at=now + 600, draining=False))
    connection.execute(duty.insert().values(name="detection", owner="h:0:x", epoch=1, leased_until=now + 600))
    connection.execute(drained_host.insert().values(host="h", since=now, asked_by="op@h"))
    connection.execute(failover_event.insert().values(failover_id=1, at=1001.0, word="begun", detail="silent for 9 s"))
    connection.execute(
        circuit_breaker.insert().values(name="automatic", state="open", since=now, silent=9, watched=10, reason="many")
    )
    stray = {"amphora_id": SPARE, "address": "192.0.2.9", "first_at": now - 60, "last_at": now}
    connection.execute(unknown_amphora.insert().values(**stray, verdict="only reported"))
    connection.execute(resync.insert().values(load_balancer_id=LB, asked_at=now - 9, remove_unknown=False))
    ca = {"kind": "amphora", "state": "current", "certificate": "PEM", "sealed_key": b"sealed-ca", "created_at": now}
    connection.execute(certificate_authority.insert().values(**ca, changed_at=now, expires_at=now + 86400.0))
    pool = {"object_id": "a-pool", "kind": "pools", "load_balancer_id": LB, "provisioning": "ACTIVE"}
    connection.execute(object_status.insert().values(**pool, operating="ERROR", reason="all enabled members are down"))
    of_pool, of_balancer = job.c.load_balancer_id == POOL, job.c.load_balancer_id == LB
    connection.execute(job.update().where(of_pool).values(spares="{}"))
    connection.execute(job.update().where(of_balancer).values(spare_pool=POOL))
    gone = {"load_balancer_id": "99990000", "generation": 1, "action": "loadbalancer_delete", "object_id": "99990000"}
    connection.execute(request.insert().values(**gone, accepted_at=1.0, applied_at=2.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("status-page")
    url = f"sqlite:///{found}/db.sqlite"
    migrated.write(url)
    database = Database(url)
    database.write(fill)
    database.write(fill_more)
    database.dispose()
    (found / "amphora-driver.conf").write_text(
        f"[amp_database]\nconnection = {url}\nencryption_key_file = {found}/keys\n"
        f"[amp_status_page]\ntoken_file = {found}/token\nbind_port = 1\n"
        "[amp_failover]\nwitnesses = 203.0.113.1:22\nautomatic = false\n[amp_spares]\nnumber = 7\n"
    )
    for name, text in (("token", f"{TOKEN}\n"), ("wrong", "another\n"), ("empty", "\n"), ("open", TOKEN)):
        (found / name).write_text(text)
        (found / name).chmod(0o604 if name == "open" else 0o600)
    return found


def write_certificate(path):
    """Write a key and a certificate of 127.0.0.1, which is its own CA."""
    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "status page")])
    dates = (now - dt.timedelta(hours=1), now + dt.timedelta(days=1))
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *dates)
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem) + private)


@contextmanager
def serving(folder, **options):
    """Run a status page with the token; yield its port."""
    conf = config.load([str(folder / "amphora-driver.conf")])
    for name, value in options.items():
        conf.set_override(name, value, "amp_status_page")
    telemetry = Telemetry(conf, ProcessKind.CONTROLLER, "h:0:x", lambda: True)
    telemetry.server.port = 0
    with telemetry:
        assert telemetry.server.wait_until_listening(60)
        yield telemetry.server.port


@pytest.fixture(scope="module")
def page(folder):
    """The address of a status page."""
    with serving(folder) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def remote(folder, page, amphoractl):
    """Return a function that runs a command line in the read-only mode; its configuration file does not exist."""

    def run(*words, url=page, token="token"):
        options = ("--status-url", url, *(("--status-token-file", str(folder / token)) if token else ()))
        return amphoractl(folder / "missing.conf", *options, *words)

    return run


def is_close(one, other):
    """Whether two outputs are equal, except for ages that grow between them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 60
    return one == other


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_the_output_is_that_of_the_database(name, folder, amphoractl, remote):
    words = (*name.split("_"), *COMMAND_LINES[name], "-f", "json")
    status, out, err = remote(*words)
    expected_status, expected, _err = amphoractl(folder / "amphora-driver.conf", *words)
    shown, wanted = json.loads(out), json.loads(expected)
    if name == "status_check":
        # The details contain ages as text.
        shown, wanted = (
            [(one["Check"], one["Result"]) for one in lines if one["Check"] not in HOST_CHECKS]
            for lines in (shown, wanted)
        )
    else:
        assert (status, expected_status) == (0, 0)
    assert err == ""
    assert wanted, "a command without output compares nothing"
    assert is_close(shown, wanted)


def test_a_deleted_load_balancer_and_an_ambiguous_prefix(remote, caplog):
    assert "loadbalancer_delete" in remote("loadbalancer", "history", "9999")[1]
    assert remote("loadbalancer", "show", LB[:6])[0] == 1
    assert "have this prefix" in caplog.text
    assert remote("loadbalancer", "show", "unknown")[0] == 1
    assert "nothing is recorded under this id" in caplog.text


def test_the_status_check_of_records(remote):
    status, out, _err = remote("status", "check", "-f", "json")
    found = {one["Check"]: (one["Result"], one["Details"]) for one in json.loads(out)}
    assert status == 2
    assert found["Status page"][0] == "Success"
    assert found["Witnesses"] == ("Success", "1 are configured"), "the options are those of the process"
    assert found["Recorded authorities"][0] == "Warning"
    assert not found.keys() & {"Keys", "Octavia's sockets", "Certificate authorities"}


def test_options_are_those_of_the_process(remote):
    (pool,) = json.loads(remote("spare", "list", "-f", "json")[1])
    assert pool["Wanted"] == 7
    assert "automatic is off" in remote("failover", "status", "-f", "json")[1]


def test_every_other_command_is_refused(remote, entry_points, caplog):
    others = [name for name, _ in entry_points(COMMANDS) if name not in COMMAND_LINES]
    assert {"loadbalancer_failover", "secrets_status", "group_list", "amphora_diagnose"} <= set(others)
    for name in others:
        caplog.clear()
        assert remote(*name.split("_"))[:2] == (1, ""), name
        assert "this command needs the database or a key" in caplog.text, name


def test_the_environment_selects_the_mode(folder, page, amphoractl, monkeypatch):
    monkeypatch.setenv("AMPHORACTL_STATUS_URL", page)
    monkeypatch.setenv("AMPHORACTL_STATUS_TOKEN_FILE", str(folder / "token"))
    status, out, _err = amphoractl(folder / "missing.conf", "amphora", "list", "-f", "value")
    assert (status, AMPHORA in out) == (0, True)


def test_the_certificate_of_the_page_is_verified(folder, remote, caplog):
    write_certificate(folder / "status.pem")
    write_certificate(folder / "other.pem")
    with serving(folder, certificate=str(folder / "status.pem")) as port:
        url = f"https://127.0.0.1:{port}"
        status, out, _err = remote("--status-ca-file", str(folder / "status.pem"), "amphora", "list", url=url)
        assert (status, AMPHORA in out) == (0, True)
        for words in ((), ("--status-ca-file", str(folder / "other.pem"))):
            caplog.clear()
            assert remote(*words, "amphora", "list", url=url)[0] == 1
            assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


class Redirecting(BaseHTTPRequestHandler):
    """Sends each client to another address."""

    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", "http://127.0.0.1:1/records.json")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Not used."""


def test_a_redirect_is_not_followed(remote, caplog):
    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert remote("amphora", "list", url=f"http://127.0.0.1:{server.server_port}")[0] == 1
        finally:
            server.shutdown()
            thread.join()
    assert "it answers with status 302" in caplog.text


@pytest.mark.parametrize(
    ("words", "more", "happened"),
    [
        ((), {"token": "wrong"}, "requires its token"),
        ((), {"token": "missing"}, "No such file"),
        ((), {"token": "empty"}, "first line is empty"),
        ((), {"token": "open"}, "other users can read the file"),
        ((), {"token": None}, "no token file is given"),
        ((), {"url": "ftp://127.0.0.1"}, "is not an address of a status page"),
        ((), {"url": f"https://user:{TOKEN}@127.0.0.1"}, "contains a user name or a password"),
        ((), {"url": "http://127.0.0.1:1"}, "Check the address"),
        (("--status-ca-file", "/missing"), {"url": "https://127.0.0.1:1"}, "Check the address"),
    ],
)
def test_a_failure_has_a_reason_and_shows_no_token(remote, caplog, words, more, happened):
    status, out, err = remote("--debug", *words, "amphora", "list", **more)
    assert (status, out) == (1, "")
    assert happened in caplog.text
    if "user:" not in more.get("url", ""):
        assert TOKEN not in caplog.text + err
