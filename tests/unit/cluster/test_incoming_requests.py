# SPDX-License-Identifier: Apache-2.0
"""Requests that arrive slowly or never: the process amphora-cluster-api with two threads, with and without TLS."""

import datetime as dt
import http.client
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import pytest
from cluster_stores import Stores, migrated
from cryptography import x509
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from free_ports import free_ports

from amphora_cluster.api import worker
from amphora_cluster.api.parameters import MOST_BYTES
from amphora_cluster.api.reading import missing_bytes
from amphora_cluster.database.tables import SCHEMA
from amphora_driver.database.engine import Database

GROUP = "11111111-1111-1111-1111-111111111111"
LEAVE = f"/v1/groups/{GROUP}/leave"
SECONDS = 60.0
MANY = worker.MOST_OF_SOURCE + 16


@pytest.mark.parametrize(
    ("received", "missing"),
    [
        (b"", 1),
        (b"GET / HTTP/1.1\r\nHost: x\r\n", 1),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\ncontent-length : 5 \r\n\r\nab", 3),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcdef", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nX: 1\r\nTransfer-Encoding: chunked\r\n\r\n", -411),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MOST_BYTES + 1), -413),
        (b"POST / HTTP/1.1\r\nContent-Length: %s\r\n\r\n" % (b"9" * 5000), -413),
        (b"x" * 40_000, -431),
    ],
)
def test_missing_bytes(received, missing):
    assert missing_bytes(received) == missing


def certificate(folder):
    """Write a certificate of 127.0.0.1 and its key; return the path."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "api.pem").write_bytes(made.public_bytes(pem) + plain)
    return folder / "api.pem"


class Api:
    """The process, and connections to it."""

    def __init__(self, port, tls, token, folder):
        self.port, self.tls, self.token, self.folder = port, tls, token, folder
        self.open = ExitStack()

    def connect(self):
        return self.open.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS))

    def encrypted(self):
        """A connection after the handshake, if the API has TLS."""
        plain = self.connect()
        return self.open.enter_context(self.tls.wrap_socket(plain, server_hostname="127.0.0.1")) if self.tls else plain

    def post(self):
        """Send a valid webhook; return the status."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind("127.0.0.1", self.port, timeout=SECONDS, **({"context": self.tls} if self.tls else {}))
        self.open.callback(connection.close)
        body, headers = json.dumps({"server": "s1"}), {"Authorization": f"Bearer {self.token}"}
        connection.request("POST", LEAVE, body, headers)
        return connection.getresponse().status

    def answer(self, text):
        """Send bytes; return the status line of the answer, and the end of it as JSON."""
        connection = self.encrypted()
        connection.sendall(text)
        found = connection.makefile("rb").read()
        return found.partition(b"\r\n")[0].decode(), json.loads(found.rpartition(b"\r\n")[2])


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def process(request, tmp_path_factory):
    """Port, TLS context, a token and the folder of one process."""
    folder = tmp_path_factory.mktemp("api")
    (folder / "cluster.sqlite").write_bytes(migrated())
    database = Database(f"sqlite:///{folder}/cluster.sqlite", schema=SCHEMA, durable=False)
    key = Fernet.generate_key()
    (folder / "keys").write_bytes(key)
    (folder / "keys").chmod(0o600)
    stores = Stores(database, key)
    stores.add(GROUP)
    token = stores.tokens.create(GROUP, "test", "test")[1].reveal().decode()
    [port] = free_ports(1)
    text = (
        f"[amp_cluster]\nconnection = {database.url}\nencryption_key_file = {folder}/keys\n"
        f"[amp_cluster_api]\nbind_port = {port}\nworkers = 1\nthreads = 2\n"
    )
    tls = None
    if request.param:
        path = certificate(folder)
        text += f"certificate = {path}\nprivate_key = {path}\n"
        tls = ssl.create_default_context(cafile=str(path))
    (folder / "cluster.conf").write_text(text)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "amphora_cluster.api.server"],
            env={**os.environ, "AMPHORA_CLUSTER_CONFIG": str(folder / "cluster.conf")},
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + SECONDS
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=SECONDS):
                break
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        yield port, tls, token, folder
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        process.terminate()
        process.wait(SECONDS)
        database.dispose()


@pytest.fixture
def api(process):
    made = Api(*process)
    with made.open:
        yield made


def test_no_client_holds_a_thread_before_its_request_is_complete(api):
    """gunicorn alone would give each of these connections one of two threads for some seconds: minutes for all."""
    silent = [api.connect() for _ in range(MANY)]
    half = [api.encrypted() for _ in range(MANY)]
    for one in half:
        with suppress(OSError):  # The API closes the oldest ones.
            one.sendall(b"POST " + LEAVE.encode() + b" HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc")
    assert api.post() == 202
    # The newest ones are open, and a complete request is served.
    half[-1].sendall(b"abcdef")
    assert half[-1].recv(100).startswith(b"HTTP/1.1 401")
    # The oldest ones made room for others from the same address.
    with suppress(ConnectionResetError):
        assert silent[0].recv(1) == b""


def test_a_client_that_does_not_close_delays_no_other(api):
    assert [api.post() for _ in range(4)] == [202] * 4


def test_refusals(api):
    head = b"POST " + LEAVE.encode() + b" HTTP/1.1\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    large = head + b"Content-Length: %d\r\n\r\n" % (MOST_BYTES + 1)
    for text, status in ((chunked, "411 Length Required"), (large, "413"), (b"x" * 40_000, "431")):
        line, document = api.answer(text)
        assert line.startswith(f"HTTP/1.1 {status}")
        assert set(document) == {"wanted", "happened", "remedy"}
    assert api.post() == 202


def test_a_client_that_waits_for_permission_to_send_the_body(api):
    connection = api.encrypted()
    body = json.dumps({"server": "s2"}).encode()
    head = f"POST {LEAVE} HTTP/1.1\r\nAuthorization: Bearer {api.token}\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"Expect: 100-continue\r\n\r\n")
    assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
    connection.sendall(body)
    assert b"HTTP/1.1 202" in connection.makefile("rb").read()


def test_a_request_in_single_bytes(api):
    connection = api.encrypted()
    for one in b"GET /healthcheck HTTP/1.1\r\nHost: x\r\n\r\n":
        connection.sendall(bytes([one]))
    assert b'"ok"' in connection.makefile("rb").read()


@pytest.mark.parametrize("process", [True], ids=["tls"], indirect=True)
def test_a_certificate_that_cannot_be_loaded_is_logged(api):
    """An operator replaces the certificate while the API runs."""
    path, log = api.folder / "api.pem", api.folder / "log"
    content = path.read_bytes()
    path.write_bytes(b"nonsense")
    for _ in range(2):
        with suppress(ConnectionResetError):
            assert api.connect().recv(1) == b""
    path.write_bytes(content)
    assert log.read_text().count("cannot load its certificate: ") == 1
    assert api.post() == 202
