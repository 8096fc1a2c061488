# SPDX-License-Identifier: Apache-2.0
"""Secrets stay in their places while all services run at DEBUG and many operations fail.

Octavia runs with debug too. Its log, its database and its folders are searched in the same way, because the driver and
octavia_lib write there. The exception is Octavia's certificate manager, in the sandbox a folder with users' keys
(`tls/`): its protection is the operator's decision.
"""

import base64
import json
import os
import secrets as random
import shutil
import subprocess
import sys
import traceback
from pathlib import Path

import mariadb
import pytest
import sqlalchemy as sa
from canaries import Canary, Search, key_in
from cloud import Cloud
from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import serialization
from dataplane.pki import Authority
from sandbox_of_a_test import running

from amphora_driver import config
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, metadata, secret
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AgentRefused
from amphora_driver.host import namespaces
from amphora_driver.model.secret_refs import ticket_secret_name
from amphora_driver.network.local import LocalNetwork
from amphora_driver.reconcile.tls_tickets import ticket_keys
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, ca_records, sealed_secrets
from sandbox import config_files, demo, topology

ROOT = Authority("root")
DEFAULT, SNI, CLIENT, SEALED, MISMATCHED, PUSHED, LOGGING = (
    ROOT.issue(f"{name}.example.com", number=number)
    for number, name in enumerate(("default", "sni", "client", "sealed", "mismatched", "pushed", "logging"), start=70)
)
PASSPHRASE, PASSWORD, BROKER, TOKEN = (f"canary{random.token_hex(12)}" for _ in range(4))
LOUD = {
    "debug": "True",
    "default_log_levels": "urllib3=DEBUG,stevedore=DEBUG,alembic=DEBUG,oslo=DEBUG,sqlalchemy=WARNING,amqp=DEBUG",
}
_USERS = ("tls/*",)


class SlowCloud(Cloud):
    """Waits longer, because DEBUG logs of all services take time."""

    @staticmethod
    def until(question, what, seconds=180.0):
        return Cloud.until(question, what, seconds)


def encrypted(pem, passphrase):
    key = serialization.load_pem_private_key(pem.encode(), None)
    form = serialization.BestAvailableEncryption(passphrase.encode())
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, form).decode()


def keep(settings, ref, certificate, key=None, passphrase=None):
    """Write a certificate into Octavia's certificate manager."""
    (settings.tls / f"{ref}.crt").write_text(certificate.certificate_pem)
    (settings.tls / f"{ref}.key").write_text(key or certificate.key_pem)
    if passphrase:
        (settings.tls / f"{ref}.pass").write_text(passphrase)


@pytest.fixture
def store():
    """A MariaDB with a password and a log of every statement."""
    if not (shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin")):
        pytest.skip("needs mariadbd")
    with mariadb.server("store") as (url,):
        root = sa.create_engine(url)
        with root.begin() as connection:
            connection.exec_driver_sql(f"CREATE USER canary@localhost IDENTIFIED BY '{PASSWORD}'")
            connection.exec_driver_sql("GRANT ALL ON store.* TO canary@localhost")
            connection.exec_driver_sql("SET GLOBAL general_log_file = 'statements.log'")
            connection.exec_driver_sql("SET GLOBAL general_log = 1")
        folder = Path(root.url.query["unix_socket"]).parent
        made = root.url.set(username="canary", password=PASSWORD)
        yield made.render_as_string(hide_password=False), folder / "data" / "statements.log"
        root.dispose()


@pytest.fixture
def log_options(tmp_path):
    """A log target that does not exist, with an authorization and a client certificate."""
    contents = {"ca_certificate": ROOT.pem, "authorization_file": f"Bearer {TOKEN}", "client_certificate": LOGGING.pem}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    files = {name: str(tmp_path / name) for name in contents}
    return {"admin_targets": f"https://{topology.CONTROL_ADDRESS}:8443/", **files}


@pytest.fixture
def debug_cloud(store, monkeypatch, log_options):
    """A sandbox at DEBUG with all kinds of secrets; yields a user's view of it."""
    url, statements = store
    quiet = config_files._octavia_options

    def octavia_options(settings):
        made = quiet(settings)
        return {**made, "DEFAULT": {**made["DEFAULT"], **LOUD}}

    monkeypatch.setattr(config_files, "_octavia_options", octavia_options)
    options = {
        "DEFAULT": LOUD,
        # No server: a connection attempt is logged.
        "amp_queue": {"engine": "celery", "broker_url": f"amqp://canary:{BROKER}@127.0.0.1:1//"},
        # CAs are rotated within the test.
        "amp_certificates": {"settle": "2"},
        "amp_controller": {"lease": "3", "housekeeping_interval": "1"},
        # The test expects a powered-off amphora to come back.
        "amp_failover": {"automatic": "False"},
        "amp_logs": log_options,
    }
    with running(store_url=url, options=options) as (_stack, settings), demo.connect(settings) as connection:
        database = Database(url)
        yield SlowCloud(settings, connection, database), statements
        database.dispose()


def canaries(cloud, authority_keys):
    """Return every secret with the files that may contain it."""
    etc = cloud.settings.etc
    users = {"default": DEFAULT, "sni": SNI, "client": CLIENT, "passphrase-protected": SEALED, "refused": MISMATCHED}
    vault = Vault.load(str(etc / "encryption.keys"))
    kept = cloud.database.read(lambda c: c.execute(sa.select(secret).where(secret.c.purpose == "tickets")).all())
    seeds = [vault.open(row.sealed, sealed_secrets.secret_location(ticket_secret_name(row.object_id))) for row in kept]
    assert len(seeds) == 1
    heartbeat = cloud.database.read(lambda c: amphorae.read_heartbeat_keys(c, vault))
    derived = base64.b64decode(ticket_keys(seeds[0]).reveal().splitlines()[1])
    settings = ("etc/amphora-driver.conf", "sandbox.json")
    return [
        *(Canary(f"user's key, {name}", key_in(one.key_pem), _USERS) for name, one in users.items()),
        Canary("user's key, pushed", key_in(PUSHED.key_pem)),
        # Their files are outside of the searched folder. In an amphora, they are in memory only.
        Canary("key for log targets", key_in(LOGGING.key_pem)),
        Canary("token for log targets", TOKEN.encode(), whole=True),
        Canary("passphrase", PASSPHRASE.encode(), _USERS, whole=True),
        *(
            Canary(f"heartbeat key of {one}", key.reveal(), (f"amphorae/{one}/etc/heartbeat.key",))
            for one, key in heartbeat.items()
        ),
        Canary("seed of TLS tickets", seeds[0].reveal()),
        Canary("key of TLS tickets", derived),
        *(
            Canary(
                f"key of {one}", key_in((cloud.settings.amphorae / one / "etc" / "server.pem").read_bytes()), (place,)
            )
            for one in heartbeat
            for place in [f"amphorae/{one}/etc/server.pem"]
        ),
        *(Canary(f"key of authority {number}", key_in(key.reveal())) for number, key in authority_keys.items()),
        Canary("controller's key", key_in((etc / "controller.pem").read_bytes()), ("etc/controller.pem",)),
        Canary("authority's key", key_in((etc / "amphora_ca.key").read_bytes()), ("etc/amphora_ca.key",)),
        *(
            Canary(f"vault key {number}", base64.urlsafe_b64decode(key), ("etc/encryption.keys",))
            for number, key in enumerate((etc / "encryption.keys").read_bytes().split())
        ),
        Canary("database password", PASSWORD.encode(), settings, whole=True),
        Canary("broker password", BROKER.encode(), settings, whole=True),
    ]


def serve(cloud):
    """Create a load balancer with every kind of secret; return it with its TLS listener."""
    settings = cloud.settings
    keep(settings, "default", DEFAULT)
    keep(settings, "sni", SNI)
    keep(settings, "client", CLIENT)
    keep(settings, "sealed", SEALED, encrypted(SEALED.key_pem, PASSPHRASE), PASSPHRASE)
    balancer = cloud.served("canary", ("member1",))
    listener = cloud.post(
        "listeners",
        {
            "listener": {
                "name": "https",
                "protocol": "TERMINATED_HTTPS",
                "protocol_port": 443,
                "loadbalancer_id": balancer.id,
                "default_tls_container_ref": "default",
                "sni_container_refs": ["sni", "sealed"],
            }
        },
    )["listener"]
    cloud.active(balancer.id)
    cloud.put(f"pools/{cloud.pool_of(balancer).id}", {"pool": {"tls_enabled": True, "tls_container_ref": "client"}})
    cloud.active(balancer.id)
    return balancer, listener["id"]


def make_the_agent_talk(cloud, amphora_id):
    """Restart the agent with DEBUG; the controller pushes all secrets again."""
    settings = cloud.settings
    path = settings.amphorae / amphora_id / "etc" / "agent.conf"
    path.write_text(path.read_text().replace("[agent]\n", "[agent]\nlog_level = DEBUG\n", 1))
    conf = config.load([str(settings.driver_configuration)])
    compute = NetnsCompute(conf, LocalNetwork(conf, cloud.database))
    compute.power_off(amphora_id)
    assert compute.power_on(amphora_id)


def refused_by_the_driver(cloud, listener):
    """Send a key of another certificate: the error names the fault without the key."""
    keep(cloud.settings, "mismatched", DEFAULT, MISMATCHED.key_pem)
    answer = cloud.balancers.put(
        cloud.url(f"listeners/{listener}"), json={"listener": {"default_tls_container_ref": "mismatched"}}
    )
    assert answer.status_code >= 400
    return answer.text


def refused_by_the_agent(cloud, amphora_id):
    """Push an invalid HAProxy configuration with a key file; return all messages about it."""
    settings = cloud.settings
    rows = cloud.database.read(lambda c: c.execute(sa.select(amphora)).all())
    (address,) = [row.management_address for row in rows if row.id == amphora_id]
    (balancer,) = [row.load_balancer_id for row in rows if row.id == amphora_id]
    bind = f"    bind 192.0.2.1:443 ssl crt tls/{balancer}/pushed\n"
    text = f"defaults\n    mode http\nfrontend {balancer}\n{bind}    default_backend rubbish\n"
    body = {
        "format": 1,
        "amphora_id": amphora_id,
        "load_balancer_id": balancer,
        "generation": 1000,
        "haproxy": text,
        "files": [{"name": f"tls/{balancer}/pushed", "content": PUSHED.pem}],
        "pings": {},
        "limits": {"connections": None, "threads": None, "drain": None, "workers": None},
        "interfaces": [],
        "allowed": [],
        "vrrp": None,
    }

    def push(client):
        with pytest.raises(AgentRefused) as caught:
            client.put_bundle(amphora_id, address, json.dumps(body).encode())
        assert "default_backend: 'rubbish'" in str(caught.value), "HAProxy refuses the configuration"
        return "".join(traceback.format_exception(caught.value)) + repr(caught.value) + repr(vars(caught.value))

    return with_agents(settings, push)


def diagnosed(cloud, amphora_id):
    """Return the diagnosis of an amphora with all its logs."""
    rows = cloud.database.read(lambda c: c.execute(sa.select(amphora)).all())
    (address,) = [row.management_address for row in rows if row.id == amphora_id]
    return json.dumps(with_agents(cloud.settings, lambda client: client.diagnostics(amphora_id, address)))


def with_agents(settings, ask):
    """Ask an agent as a controller does."""

    def go():
        conf = config.load([str(settings.driver_configuration)])
        database = Database(conf.amp_database.connection)
        client = AgentClient(conf, TrustStore(conf, database, Vault.load(conf.amp_database.encryption_key_file)))
        try:
            return ask(client)
        finally:
            client.close()
            database.dispose()

    return namespaces.run_inside(namespaces.path(settings.control), go)


def failed_in_the_controller(cloud, balancer, listener):
    """Cause a decoding error in a frame that has the secret in clear."""
    vault = Vault.load(str(cloud.settings.etc / "encryption.keys"))
    before = cloud.database.read(lambda c: sealed_secrets.load_secrets(c, balancer.id))
    (name,) = [one for one in before if one.ref == "sni"]
    spoilt = vault.seal(Secret(SNI.pem.encode() + b"\xff"), sealed_secrets.secret_location(name))
    cloud.database.write(
        lambda c: sealed_secrets.replace_secrets(c, balancer.id, {name: sealed_secrets.SealedSecret(content=spoilt)})
    )
    cloud.balancers.update_listener(cloud.listener_of(balancer), name="renamed")
    cloud.until(lambda: state(cloud, listener) == "ERROR", "the listener is in ERROR")
    cloud.active(balancer.id)
    cloud.database.write(lambda c: sealed_secrets.replace_secrets(c, balancer.id, {name: before[name]}))


def said(cloud, words):
    return words in (cloud.settings.log / "amphora-controller.log").read_text(errors="replace")


def state(cloud, listener):
    return cloud.balancers.get_listener(listener).provisioning_status


def pushed_in_vain(cloud, balancer, amphora_id):
    """Power off the machine during a change: the push fails and is retried."""
    conf = config.load([str(cloud.settings.driver_configuration)])
    compute = NetnsCompute(conf, LocalNetwork(conf, cloud.database))
    compute.power_off(amphora_id)
    cloud.balancers.update_listener(cloud.listener_of(balancer), name="again")
    cloud.until(lambda: said(cloud, "; the controller tries again in"), "the push failed")
    compute.power_on(amphora_id)
    cloud.active(balancer.id)


@pytest.mark.root
def test_secrets_are_in_their_permitted_places_only(debug_cloud):
    cloud, statements = debug_cloud
    balancer, listener = serve(cloud)
    (amphora_id,) = cloud.amphorae(balancer)
    shown = '"client_certificate": "***"'
    cloud.until(lambda: shown in diagnosed(cloud, amphora_id), "the amphora has the secrets of its log target")
    told = [diagnosed(cloud, amphora_id), refused_by_the_driver(cloud, listener)]
    told.append(refused_by_the_agent(cloud, amphora_id))
    pushed_in_vain(cloud, balancer, amphora_id)
    make_the_agent_talk(cloud, amphora_id)
    failed_in_the_controller(cloud, balancer, listener)
    rotated(cloud, balancer)
    keys, said_by_commands = authorities_rotated(cloud, balancer)

    told += said_by_commands
    cloud.until(lambda: shown in diagnosed(cloud, amphora_id), "the amphora has them again after its reboot")
    told.append(diagnosed(cloud, amphora_id))
    everything = canaries(cloud, keys)
    search = Search(everything)
    found, files = search.files(cloud.settings.state)
    at, processes = search.processes()
    with cloud.database.engine.connect() as connection:
        inside, rows = search.tables(connection, metadata.sorted_tables)
    elsewhere = [("statements sent to the database", name) for name in search.within(statements.read_bytes())]
    answers = [("an answer", name) for text in told for name in search.within(text.encode())]
    assert found + at + inside + elsewhere + answers == []

    # The search detects planted secrets, and has searched files.
    assert (files > 30, processes > 50, rows > 20) == (True, True, True)
    assert statements.stat().st_size > 100_000
    logs = {path.name: path.read_bytes() for path in cloud.settings.log.glob("*.log")}
    assert {name for name, text in logs.items() if b"DEBUG" in text} >= {
        "octavia-api.log",
        "octavia-driver-agent.log",
        "amphora-controller.log",
        "amphora-health-manager.log",
    }
    assert "DEBUG" in told[-1], "the diagnosis contains the amphora's log"
    plant(cloud, search, everything)


def rotated(cloud, balancer):
    """Add a new encryption key at runtime; secrets encrypted with either key are usable."""
    path = cloud.settings.etc / "encryption.keys"
    fresh = path.with_name("fresh.keys")
    fresh.write_bytes(Fernet.generate_key() + b"\n" + path.read_bytes())
    fresh.chmod(0o600)
    fresh.replace(path)
    keep(cloud.settings, "sni", SNI)
    listener = next(one for one in cloud.balancers.listeners() if one.protocol == "TERMINATED_HTTPS")
    cloud.put(f"listeners/{listener.id}", {"listener": {"sni_container_refs": ["sni", "sealed"]}})
    cloud.active(balancer.id)
    vault = Vault.load(str(path))
    kept = cloud.database.read(lambda c: sealed_secrets.load_secrets(c, balancer.id))
    places = {name.ref: vault.key_index(one.content) for name, one in kept.items()}
    assert (places["sni"], places["client"]) == (0, 1), "the API process uses the new key"
    assert cloud.balancers.get_listener(listener.id).provisioning_status == "ACTIVE"


def authorities_rotated(cloud, balancer):
    """Rotate both CAs; return their keys and the command's output."""
    settings, said_by_it = cloud.settings, []
    for kind in ca_records.CaKind:
        done = subprocess.run(
            [Path(sys.executable).with_name("amphoractl"), "-vvv", "ca", "rotate", "--kind", kind.value],
            env={**os.environ, config.FILE_VARIABLE: str(settings.driver_configuration)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said_by_it.append(done.stdout + done.stderr)
    vault = Vault.load(str(settings.etc / "encryption.keys"))
    recorded = cloud.database.read(lambda c: ca_records.list_cas(c, gone=True))
    keys = {
        one.id: vault.open(one.sealed_key, ca_records.key_location(one.kind, one.certificate))
        for one in recorded
        if one.sealed_key is not None
    }
    assert len(keys) == 2
    cloud.until(
        lambda: {one.state for one in cloud.database.read(ca_records.list_cas)} == {ca_records.CaState.CURRENT},
        "both rotations have ended",
    )
    cloud.balancers.update_listener(cloud.listener_of(balancer), name="after a rotation")
    cloud.active(balancer.id)
    return keys, said_by_it


def plant(cloud, search, everything):
    """Assert that the search finds each canary in every encoding and place."""
    folder = Path(cloud.settings.state, "planted")
    folder.mkdir()
    log = folder / "planted.log"
    for canary in everything:
        content = canary.secret
        inside = base64.b64encode(b"x" + content + b"yz")
        shapes = [content, content.hex().encode(), repr(content)[2:-1].encode(), inside]
        for shape in shapes[:2] if canary.whole else shapes:
            log.write_bytes(b"DEBUG something\n" + shape + b"\nDEBUG something else\n")
            found, _ = search.files(folder)
            assert ("planted.log", canary.name) in found, (canary.name, shape)
    log.write_text(f"2026 DEBUG {{'private_key': {SNI.key_pem!r}}}\n")
    assert ("planted.log", "user's key, sni") in search.files(folder)[0]
    log.unlink()
    folder.rmdir()
