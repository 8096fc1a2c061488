# SPDX-License-Identifier: Apache-2.0
"""TLS through Octavia's API, from the certificate manager to a client's handshake with an amphora."""

import http.client
import socket
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from cloud import Cloud
from cryptography import x509
from cryptography.x509.oid import NameOID
from dataplane.pki import Authority
from sandbox_of_a_test import running

from amphora_driver import config
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import metadata
from amphora_driver.host import namespaces
from amphora_driver.network.local import LocalNetwork
from amphora_driver.store import sealed_secrets
from sandbox import demo, topology

pytestmark = pytest.mark.root

ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)
CLIENTS = Authority("clients")
ONE, TWO, THREE, FOUR = (
    MIDDLE.issue(f"{name}.example.com", number=number)
    for number, name in enumerate(("one", "two", "three", "four"), start=10)
)
ADA, EVE = (CLIENTS.issue(name, number=20) for name in ("ada", "eve"))


class Secrets:
    """Octavia's certificate manager in the sandbox: a folder."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def put(self, ref, certificate):
        (self.folder / f"{ref}.key").write_text(certificate.key_pem)
        (self.folder / f"{ref}.int").write_text(certificate.chain_pem)
        (self.folder / f"{ref}.crt").write_text(certificate.certificate_pem)

    def put_text(self, ref, text):
        (self.folder / f"{ref}.crt").write_text(text)

    def remove(self, ref):
        for path in self.folder.glob(f"{ref}.*"):
            path.unlink()


@pytest.fixture
def kept(settings):
    made = Secrets(settings.tls)
    for ref, certificate in (("one", ONE), ("two", TWO), ("three", THREE)):
        made.put(ref, certificate)
    made.put_text("clients", CLIENTS.pem)
    made.put_text("revoked", CLIENTS.revoke(EVE))
    return made


def handshake_result(cloud, address, name=None, *, client=None, port=443, tmp_path=None):
    """Return the name on the server's certificate and the answering member, or the error."""
    context = ssl.create_default_context(cadata=ROOT.pem)
    context.check_hostname = False
    if client is not None:
        path = tmp_path / "client.pem"
        path.write_text(client.pem)
        context.load_cert_chain(path)

    def go():
        try:
            with (
                socket.create_connection((address, port), timeout=5) as plain,
                context.wrap_socket(plain, server_hostname=name) as secured,
            ):
                shown = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True))
                secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answer = http.client.HTTPResponse(secured)
                answer.begin()
                body = answer.read().decode().strip()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        names = shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        return names[0].value.partition(".")[0], body if answer.status == 200 else answer.status

    return namespaces.run_inside(namespaces.path(cloud.settings.host(topology.CLIENT)), go)


def secure(cloud, name="tls", members=("member1",), **more):
    """Create a load balancer with an HTTP and a TERMINATED_HTTPS listener for the same pool."""
    balancer = cloud.served(name, members)
    values = {
        "name": f"{name}-https",
        "protocol": "TERMINATED_HTTPS",
        "protocol_port": 443,
        "loadbalancer_id": balancer.id,
        "default_pool_id": cloud.pool_of(balancer).id,
        "default_tls_container_ref": "one",
    }
    made = cloud.post("listeners", {"listener": {**values, **more}})["listener"]
    cloud.active(balancer.id)
    return balancer, made["id"]


def change(cloud, balancer, listener, **more):
    cloud.put(f"listeners/{listener}", {"listener": more})
    cloud.active(balancer.id)


def status(cloud, listener):
    return cloud.balancers.get_listener(listener).provisioning_status


def references(cloud, balancer, listener):
    found = cloud.database.read(lambda connection: sealed_secrets.load_secrets(connection, balancer.id))
    return {name.ref for name, one in found.items() if name.object_id == listener and one.content}


def test_certificates_are_added_replaced_and_removed(cloud, kept):
    balancer, listener = secure(cloud, sni_container_refs=["two", "three"])
    address = balancer.vip_address
    shown = {name: handshake_result(cloud, address, f"{name}.example.com") for name in ("one", "two", "three", "other")}
    assert shown == {name: (name if name != "other" else "one", "member1") for name in shown}
    # Replace the default certificate; the others stay.
    kept.put("four", FOUR)
    change(cloud, balancer, listener, default_tls_container_ref="four")
    assert handshake_result(cloud, address)[0] == "four"
    assert handshake_result(cloud, address, "three.example.com")[0] == "three"
    # Update with the same reference after its content was replaced.
    kept.put("four", ONE)
    change(cloud, balancer, listener, default_tls_container_ref="four")
    assert handshake_result(cloud, address)[0] == "one"
    # Octavia does not report the removal of the last SNI certificate.
    change(cloud, balancer, listener, sni_container_refs=[])
    assert handshake_result(cloud, address, "two.example.com")[0] == "one"
    assert references(cloud, balancer, listener) == {"four"}
    cloud.balancers.delete_listener(listener)
    cloud.active(balancer.id)
    assert references(cloud, balancer, listener) == set()
    assert cloud.answers(address, 1) == {"member1": 1}


@pytest.mark.extended
def test_sni_alone_is_tls_too(cloud, kept):
    balancer, listener = secure(cloud, default_tls_container_ref=None, sni_container_refs=["two", "one"])
    assert handshake_result(cloud, balancer.vip_address) == ("two", "member1"), (
        "the request's first reference is the default"
    )
    change(cloud, balancer, listener, name="renamed")
    assert handshake_result(cloud, balancer.vip_address) == ("two", "member1")


def test_client_certificates_are_required(cloud, kept, tmp_path):
    balancer, listener = secure(cloud, client_authentication="MANDATORY", client_ca_tls_container_ref="clients")
    address = balancer.vip_address

    def seen(client=None):
        return handshake_result(cloud, address, client=client, tmp_path=tmp_path)

    assert isinstance(seen(), str)
    assert seen(ADA) == seen(EVE) == ("one", "member1")
    assert isinstance(seen(TWO), str), "another authority issued the certificate"
    # Octavia does not include the content in an update of the revocation list alone.
    change(cloud, balancer, listener, client_crl_container_ref="revoked")
    assert seen(ADA) == ("one", "member1")
    assert isinstance(seen(EVE), str)
    change(cloud, balancer, listener, client_crl_container_ref=None, client_authentication="OPTIONAL")
    assert seen() == seen(EVE) == ("one", "member1")
    change(cloud, balancer, listener, client_authentication="NONE", client_ca_tls_container_ref=None)
    assert seen() == ("one", "member1")
    assert references(cloud, balancer, listener) == {"one"}


@contextmanager
def tls_member(cloud, name, certificate, tmp_path, port=8443):
    """Run a TLS server in a member's namespace."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    path = tmp_path / "member.pem"
    path.write_text(certificate.pem)
    context.load_cert_chain(path)
    bound = namespaces.run_inside(
        namespaces.path(cloud.settings.host(name)), lambda: socket.create_server(("", port), backlog=16)
    )

    def serve():
        while True:
            try:
                plain, _ = bound.accept()
            except OSError:
                return
            try:
                plain.settimeout(10)
                with context.wrap_socket(plain, server_side=True) as secured:
                    secured.recv(4096)
                    secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nencrypted")
            except OSError:
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        bound.shutdown(socket.SHUT_RDWR)
        bound.close()
        thread.join()


def test_tls_pools_verify_members(cloud, kept, tmp_path):
    kept.put_text("authority", ROOT.pem)
    kept.put_text("another", CLIENTS.pem)
    balancer = cloud.served("encrypted", ())
    pool = cloud.pool_of(balancer)
    member = cloud.member("member1", protocol_port=8443)
    with tls_member(cloud, "member1", ONE, tmp_path):
        cloud.balancers.create_member(pool, **member)
        cloud.active(balancer.id)
        assert "encrypted" not in cloud.answers(balancer.vip_address, 1)

        def change_pool(**more):
            cloud.put(f"pools/{pool.id}", {"pool": more})
            cloud.active(balancer.id)

        change_pool(tls_enabled=True, ca_tls_container_ref="authority")
        assert cloud.answers(balancer.vip_address, 2) == {"encrypted": 2}
        change_pool(ca_tls_container_ref="another")
        assert cloud.answers(balancer.vip_address, 1) == {"503": 1}, "another authority issued the certificate"
        change_pool(ca_tls_container_ref=None, tls_container_ref="two")
        assert cloud.answers(balancer.vip_address, 2) == {"encrypted": 2}


def test_a_whole_tree_with_tls_in_one_request(cloud, kept):
    rules = [{"type": "HOST_NAME", "compare_type": "EQUAL_TO", "value": "nobody"}]
    listeners = [
        {
            "name": f"listener {port}",
            "protocol": "TERMINATED_HTTPS",
            "protocol_port": port,
            "default_tls_container_ref": default,
            "sni_container_refs": more,
            "l7policies": [{"name": f"policy {port}", "action": "REJECT", "rules": rules}],
            "default_pool": {
                "name": f"pool {port}",
                "protocol": "HTTP",
                "lb_algorithm": "ROUND_ROBIN",
                "members": [cloud.member("member1")],
            },
        }
        for port, default, more in ((443, "one", ["two", "three"]), (444, "two", ["three"]))
    ]
    balancer = cloud.load_balancer("whole", listeners=listeners)
    address = balancer.vip_address
    assert handshake_result(cloud, address) == ("one", "member1")
    assert handshake_result(cloud, address, "two.example.com") == ("two", "member1")
    assert handshake_result(cloud, address, "one.example.com", port=444) == ("two", "member1"), (
        "each listener has its own certificates"
    )
    found = {(one.name, one.provisioning_status) for one in cloud.balancers.listeners()}
    assert found == {("listener 443", "ACTIVE"), ("listener 444", "ACTIVE")}


def test_an_unreadable_secret_affects_its_own_listener_only(cloud, kept):
    """A secret that cannot be decrypted sets its listener to ERROR; the other listener serves."""
    balancer, listener = secure(cloud)
    kept.put("four", FOUR)
    lost = cloud.database.write(
        lambda connection: connection.execute(metadata.tables["secret"].update().values(sealed=b"of another key"))
    )
    assert lost.rowcount == 2, "the certificate, and the seed of the session tickets"
    cloud.balancers.update_listener(cloud.listener_of(balancer), name="renamed")
    cloud.active(balancer.id)
    assert status(cloud, listener) == "ERROR"
    assert cloud.answers(balancer.vip_address, 1) == {"member1": 1}
    change(cloud, balancer, listener, default_tls_container_ref="four")
    assert status(cloud, listener) == "ACTIVE"
    assert handshake_result(cloud, balancer.vip_address) == ("four", "member1")


def test_a_restarted_machine_gets_its_keys_again(cloud, kept, settings):
    """Keys are in memory only: after a restart the amphora reports their loss and gets them by a push."""
    balancer, listener = secure(cloud)
    assert handshake_result(cloud, balancer.vip_address) == ("one", "member1")
    (amphora_id,) = cloud.amphorae(balancer)
    conf = config.load([str(settings.etc / "amphora-driver.conf")])
    compute = NetnsCompute(conf, LocalNetwork(conf, cloud.database))
    # On a busy machine the reboot exceeds the limit for silent amphorae.
    with cloud.without_automatic_failover():
        compute.power_off(amphora_id)
        assert isinstance(handshake_result(cloud, balancer.vip_address), str)
        assert compute.power_on(amphora_id)
        cloud.until(
            lambda: handshake_result(cloud, balancer.vip_address) == ("one", "member1"), "the TLS listener serves"
        )
    assert cloud.amphorae(balancer) == {amphora_id}
    assert {status(cloud, listener), cloud.balancers.get_load_balancer(balancer.id).provisioning_status} == {"ACTIVE"}


def test_no_users_key_is_stored_in_clear(tmp_path):
    """No file of a sandbox at DEBUG contains a user's key; an amphora keeps keys in memory only."""
    with running(options={"DEFAULT": {"debug": "True"}}) as (_stack, settings), demo.connect(settings) as connection:
        database = Database(settings.database_url)
        cloud = Cloud(settings, connection, database)
        kept = Secrets(settings.tls)
        for ref, certificate in (("one", ONE), ("two", TWO), ("three", THREE)):
            kept.put(ref, certificate)
        balancer, _listener = secure(cloud, sni_container_refs=["two", "three"])
        cloud.put(f"pools/{cloud.pool_of(balancer).id}", {"pool": {"tls_enabled": True, "tls_container_ref": "three"}})
        cloud.active(balancer.id)
        lines = {line for one in (ONE, TWO, THREE) for line in one.key_pem.splitlines() if not line.startswith("-")}
        looked = {"log": 0, "other": 0}
        for path in Path(settings.state).rglob("*"):
            if path.is_file() and settings.tls not in path.parents:
                content = path.read_bytes()
                looked["log" if b"DEBUG" in content else "other"] += 1
                assert not [line for line in lines if line.encode() in content], path
        database.dispose()
    assert looked["log"] >= 2
    assert looked["other"] > 10
