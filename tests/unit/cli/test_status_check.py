# SPDX-License-Identifier: Apache-2.0
"""`status check`: the exit status; one missing component hides no other finding."""

import datetime as dt
import json
import re
import select
import socket
import sys
import threading
import time

import migrated
import pytest
import sqlalchemy as sa
from cryptography import x509
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from amphora_driver import config
from amphora_driver.cli import host_checks
from amphora_driver.cli.status_checks import Result
from amphora_driver.database import schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.schema_check import Phase
from amphora_driver.database.tables import amphora, desired_object, job, secret
from amphora_driver.database.tables_fleet import process
from amphora_driver.database.vault import Vault
from amphora_driver.installation import installed_version
from amphora_driver.secret import Secret
from amphora_driver.store.amphorae import key_location

NAMES = (
    *("Local sockets", "Broker", "Octavia's providers", "Database", "Keys", "Backends", "Log targets"),
    *("Controllers", "Health managers", "Provider agents", "Versions", "Load balancers", "Pending work"),
    *(
        "Octavia's sockets",
        "Certificate authorities",
        "Certificates",
        "TLS certificates",
        "Circuit breaker",
        "Witnesses",
        "Silent amphorae",
        "Fail-overs",
        "Rotations",
    ),
    *("Drift", "Limits", "Unknown amphorae", "Agents", "Images", "Octavia's records"),
)


def certificate(days):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
    now = dt.datetime.now(dt.timezone.utc)
    dates = (now - dt.timedelta(days=1), now + dt.timedelta(days=days))
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *dates)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Sockets:
    """A fake of octavia-driver-agent's sockets that answers with complete documents."""

    def __init__(self, folder):
        self.heard = []
        self.closed_early = 0
        # Seconds between the two parts of an answer.
        self.pause = 0.0
        # Answered connections stay open until this event.
        self.may_close = threading.Event()
        self.may_close.set()
        self._listeners = []
        for name in ("status", "stats", "get"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / f"{name}.sock"))
            listener.listen()
            self._listeners.append(listener)
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _serve(self, listener):
        while True:
            try:
                asking, _ = listener.accept()
            except OSError:
                return
            with asking, asking.makefile("rb") as stream:
                length = stream.readline()
                if length:
                    self.heard.append(json.loads(stream.read(int(length))))
                    asking.sendall(b"2\n")
                    if select.select([asking], [], [], self.pause)[0]:
                        self.closed_early += 1
                    else:
                        asking.sendall(b"{}")
                        self.may_close.wait(60)

    def close(self):
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._listeners.clear()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "bells").mkdir()
    for name in ("ca", "client_ca", "client"):
        (tmp_path / f"{name}.pem").write_bytes(certificate(400))
    return tmp_path


@pytest.fixture
def place(folder):
    path = folder / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{folder}/db.sqlite\nencryption_key_file = {folder}/keys\n"
        f"[amp_queue]\nsocket_dir = {folder}/bells\n"
        f"[amp_octavia]\nstatus_socket = {folder}/status.sock\nstats_socket = {folder}/stats.sock\n"
        f"get_socket = {folder}/get.sock\n"
        f"[amp_certificates]\nca_certificate = {folder}/ca.pem\nclient_ca = {folder}/client_ca.pem\n"
        f"client_certificate = {folder}/client.pem\n"
        f"[amp_compute_netns]\ndirectory = {folder}/amphorae\nagent_python = /bin/true\n"
        "[amp_failover]\nwitnesses = 203.0.113.1:22\n"
    )
    return path


@pytest.fixture
def database(place):
    url = f"sqlite:///{place.parent}/db.sqlite"
    migrated.write(url)
    made = Database(url)
    yield made
    made.dispose()


@pytest.fixture
def sockets(folder):
    made = Sockets(folder)
    yield made
    made.close()


@pytest.fixture
def healthy(database, sockets):
    """Rows of a control plane without findings."""

    def write(connection):
        for kind in ("controller", "health-manager", "provider-agent"):
            row = {"name": f"{kind}-1", "kind": kind, "host": socket.gethostname(), "version": installed_version()}
            connection.execute(process.insert().values(**row, started_at=0.0, seen_at=time.time()))

    database.write(write)
    return database


@pytest.fixture
def check(amphoractl, place):
    def run(*words):
        status, out, _err = amphoractl(place, "status", "check", "-f", "json", *words)
        return status, {one["Check"]: (one["Result"], one["Details"]) for one in json.loads(out or "[]")}

    return run


def test_a_healthy_control_plane_has_no_findings(check, healthy, sockets):
    status, found = check()
    assert {name: result for name, (result, _) in found.items()} == dict.fromkeys(NAMES, "Success")
    assert status == 0
    assert tuple(found) == NAMES, "programs read the results in this order"
    assert len(sockets.heard) == 3, "each socket got one complete empty document"
    assert check("--problems") == (0, {})


def test_the_check_reads_the_complete_answers(check, healthy, sockets):
    """Otherwise, octavia-driver-agent logs the interrupted answer as an error with a traceback."""
    sockets.pause = 0.3
    assert check()[0] == 0
    assert sockets.closed_early == 0


def test_the_check_does_not_wait_for_the_end_of_a_connection(check, healthy, sockets):
    sockets.may_close.clear()
    try:
        assert check()[0] == 0
    finally:
        sockets.may_close.set()


def test_without_a_database_the_other_checks_run(check, place, amphoractl):
    status, found = check()
    assert status == 2
    assert found["Database"][0] == "Failure"
    assert "amphoractl database upgrade" in found["Database"][1]
    assert found["Local sockets"][0] == "Success"
    assert found["Everything else"][0] == "Warning"


def test_a_schema_of_another_version_that_works_is_described(check, healthy, database, monkeypatch):
    known = schema_check.known_revisions()
    newest, later = known[-1], f"{int(known[-1]) + 1:04}"
    database.write(lambda c: c.execute(sa.text(f"UPDATE alembic_version SET version_num = '{later}'")))
    assert check()[1]["Database"] == (
        "Success",
        f"schema {later}, newer than {newest} of this version by expand migrations only",
    )
    both = dict.fromkeys((*known, later), Phase.EXPAND) | {f"{later}1": Phase.CONTRACT}
    monkeypatch.setattr(schema_check, "_migrations", lambda _: both)
    status, found = check()
    assert (status, found["Database"][0]) == (1, "Warning")
    assert found["Database"][1].endswith("When all processes have it: amphoractl database upgrade --contract.")


def test_no_process_is_alive(check, database):
    status, found = check()
    assert status == 2
    assert all(found[one][0] == "Failure" for one in ("Controllers", "Health managers", "Provider agents"))
    assert found["Octavia's sockets"][0] == "Failure"


def test_octavias_sockets_on_another_host_are_no_finding(check, healthy, sockets):
    sockets.close()
    status, found = check()
    assert (status, found["Octavia's sockets"][0]) == (2, "Failure")
    healthy.write(lambda c: c.execute(process.update().values(host="elsewhere")))
    status, found = check()
    assert (status, found["Octavia's sockets"]) == (
        0,
        ("Success", "not on this host; a provider agent runs on another host"),
    )


def test_the_check_of_encryption_keys(check, healthy, folder):
    old, new = (folder / "keys").read_bytes(), Fernet.generate_key()
    row = {"id": "a", "load_balancer_id": "l", "role": "SINGLE", "state": "booting", "created_at": 0.0}
    sealed = Vault([old]).seal(Secret(b"canary"), key_location("a"))
    healthy.write(lambda c: c.execute(amphora.insert().values(**row, heartbeat_key=sealed)))
    for other, words in (
        (Fernet(old).encrypt(b"canary"), "1 of 1 secrets were encrypted for other rows"),
        (Vault([old]).seal(Secret(b"canary"), key_location("b")), "1 of 1 secrets were encrypted for other rows"),
    ):
        healthy.write(lambda c, other=other: c.execute(amphora.update().values(heartbeat_key=other)))
        status, found = check()
        assert (status, found["Keys"][0]) == (2, "Failure")
        assert re.search(words, found["Keys"][1])
    healthy.write(lambda c: c.execute(amphora.update().values(heartbeat_key=sealed)))
    (folder / "keys").write_bytes(new + b"\n" + old)
    status, found = check()
    assert (status, found["Keys"][0]) == (1, "Warning")
    assert "amphoractl secrets reencrypt" in found["Keys"][1]
    (folder / "keys").write_bytes(new)
    status, found = check()
    assert (status, found["Keys"][0]) == (2, "Failure")
    assert "decrypts 1 of 1 secrets" in found["Keys"][1]
    (folder / "keys").unlink()
    assert check()[1]["Keys"][0] == "Failure"


def test_a_backend_that_is_not_installed(check, healthy):
    row = {"load_balancer_id": "l", "op": "apply", "generation": 1, "committed": 1, "applied": 1, "dirty": False}
    healthy.write(lambda c: c.execute(job.insert().values(**row, compute="vanished", network="local")))
    status, found = check()
    assert (status, found["Backends"][0]) == (2, "Failure")
    assert "enabled_drivers" in found["Backends"][1]


def test_the_check_of_certificate_files(check, healthy, folder):
    (folder / "client.pem").write_bytes(certificate(3))
    assert check()[1]["Certificate authorities"][0] == "Warning"
    (folder / "client.pem").write_text("no certificate")
    assert check()[1]["Certificate authorities"][0] == "Failure"
    (folder / "client.pem").unlink()
    found = check()[1]["Certificate authorities"]
    assert (found[0], "not readable on this host" in found[1]) == ("Warning", True)


@pytest.mark.parametrize(
    ("days", "result", "words"),
    [(300, "Success", "expires in"), (3, "Warning", "Replace the file"), (-0.5, "Failure", "has expired")],
)
def test_the_check_of_the_certificate_for_log_targets(tmp_path, days, result, words):
    conf = config.load([])
    assert host_checks.check_log_certificate(conf, 0.0).result is Result.SUCCESS
    file = tmp_path / "client.pem"
    conf.set_override("client_certificate", str(file), "amp_logs")
    assert "not readable on this host" in host_checks.check_log_certificate(conf, 0.0).details
    file.write_text("no certificate")
    assert host_checks.check_log_certificate(conf, 0.0).result is Result.FAILURE
    file.write_bytes(certificate(days))
    found = host_checks.check_log_certificate(conf, dt.datetime.now(dt.timezone.utc).timestamp())
    assert (found.result.name, words in found.details) == (result.upper(), True)


def test_limits_and_expiring_certificates_name_the_load_balancer(check, healthy, place):
    machine = {"id": "am", "load_balancer_id": "lb", "role": "SINGLE", "state": "booting", "created_at": 0.0}
    names = {"object_id": "li", "purpose": "certificate", "ref": "r", "load_balancer_id": "lb"}
    listener = {"id": "li", "kind": "listeners", "load_balancer_id": "lb", "created": 1, "generation": 1, "body": "{}"}

    def write(connection):
        connection.execute(job.insert().values(load_balancer_id="lb", op="apply", generation=1))
        connection.execute(amphora.insert().values(**machine, heartbeat_key=b"", near_limit="memory,conntrack"))
        connection.execute(desired_object.insert().values(**listener))
        connection.execute(secret.insert().values(**names, expires_at=time.time() + 20.5 * 86_400))

    healthy.write(write)
    status, found = check()
    assert status >= 1
    assert found["Limits"][0] == found["TLS certificates"][0] == "Warning"
    assert "am of load balancer lb: memory, tracked connections" in found["Limits"][1]
    assert "listener li of load balancer lb in 20" in found["TLS certificates"][1]
    place.write_text(place.read_text() + "\n[amp_tls]\nexpiry_days = 20\n")
    assert check()[1]["TLS certificates"] == (
        "Success",
        "none of the listeners' and pools' certificates expires within 20 days",
    )
    healthy.write(lambda c: c.execute(secret.update().values(expires_at=time.time() - 7200)))
    assert "listener li of load balancer lb 2" in check()[1]["TLS certificates"][1]


def test_a_broker_without_an_answer_is_a_finding(check, healthy, place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    more = f"\n[amp_queue]\nsocket_dir = {place.parent}/bells\nengine = celery\n"
    place.write_text(place.read_text() + more + f"broker_url = amqp://user:canary@127.0.0.1:{port}//\n")
    status, found = check()
    assert (status, found["Broker"][0]) == (1, "Warning")
    assert "canary" not in found["Broker"][1]


def test_a_missing_celery_is_a_finding(check, healthy, place, monkeypatch):
    # Other OpenStack services install Kombu without Celery.
    monkeypatch.setitem(sys.modules, "celery", None)
    place.write_text(place.read_text() + f"\n[amp_queue]\nsocket_dir = {place.parent}/bells\nengine = celery\n")
    assert check()[1]["Broker"][1].startswith("celery is not installed")


def test_a_missing_socket_directory_is_a_finding(check, healthy, folder):
    (folder / "bells").rmdir()
    status, found = check()
    assert (status, found["Local sockets"][0]) == (1, "Warning")


def test_an_unexpected_error_is_a_finding():
    found = host_checks.run_check("Something", lambda: 1 / 0)
    assert (found.result.word, "ZeroDivisionError" in found.details) == ("Failure", True)


def test_the_check_prints_a_table(amphoractl, place, healthy):
    out = amphoractl(place, "status", "check", "--max-width", "0")[1]
    assert "| Check" in out
    assert "| Octavia's sockets | Success | all three answer" in " ".join(out.split()).replace("| ", "| ")
