# SPDX-License-Identifier: Apache-2.0
"""Files with secrets for an amphora, and objects whose secret is unavailable."""

import json
import logging
import re
from types import SimpleNamespace

import pytest
from cryptography.fernet import Fernet
from msgspec.structs import replace

from amphora_driver import config
from amphora_driver.database.vault import Vault
from amphora_driver.model.enums import L7Action, ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Member, Pool, Profile, Vip
from amphora_driver.model.secret_refs import Purpose, SecretName, ticket_secret_name
from amphora_driver.queue.jobs import Lease
from amphora_driver.reconcile import secret_files
from amphora_driver.reconcile import steps as step_types
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.push import BundlePush
from amphora_driver.render.bundle import BundleFile, Served, bundle
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, ca_records
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location

LB = "10000000-0000-4000-8000-000000000001"
PLAIN, SECURE, BROKEN, POOL, CRYPTED = (f"20000000-0000-4000-8000-00000000000{n}" for n in range(1, 6))
MEMBERS = tuple(f"30000000-0000-4000-8000-00000000000{n}" for n in range(1, 3))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
CERTIFICATE = SecretName(SECURE, Purpose.CERTIFICATE, "one")
MARK = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49AgEG\n-----END PRIVATE KEY-----\n"


@pytest.fixture
def vault():
    return Vault([Fernet.generate_key()])


def listener(listener_id, port, **more):
    protocol = more.pop("protocol", ListenerProtocol.TERMINATED_HTTPS)
    return Listener(
        id=listener_id, loadbalancer_id=LB, protocol=protocol, protocol_port=port, default_pool_id=POOL, **more
    )


def pool(pool_id, member_id, **more):
    member = Member(id=member_id, pool_id=pool_id, address="192.0.2.1", protocol_port=80)
    return Pool(id=pool_id, loadbalancer_id=LB, protocol=PoolProtocol.HTTP, members=(member,), **more)


TREE = LoadBalancer(
    id=LB,
    project_id="demo",
    vip=VIP,
    profile=Profile(process_connection_limit=500, process_threads=2),
    listeners=(
        listener(PLAIN, 80, protocol=ListenerProtocol.HTTP),
        listener(SECURE, 443, default_tls_container_ref="one"),
        listener(BROKEN, 444, default_tls_container_ref="two"),
    ),
    pools=(pool(POOL, MEMBERS[0]), pool(CRYPTED, MEMBERS[1], tls_enabled=True, ca_tls_container_ref="ca")),
)


def test_a_secret_becomes_a_files_content_and_stays_redacted(vault):
    files = (File(name="a", content="list"), File(name="b", secret=CERTIFICATE))
    found, lost = secret_files.fill_files(
        files,
        {CERTIFICATE: SealedSecret(content=vault.seal(Secret(MARK.encode()), secret_location(CERTIFICATE)))},
        vault,
    )
    assert lost == {}
    assert [(one.name, one.content.reveal().decode()) for one in found] == [("a", "list"), ("b", MARK)]
    assert "BEGIN" not in repr(found)


@pytest.mark.parametrize(
    ("sealed", "word"),
    [
        ({}, "never handed over"),
        ({CERTIFICATE: SealedSecret(reason="Octavia could not")}, "Octavia could not"),
        (
            {
                CERTIFICATE: SealedSecret(
                    content=Vault([Fernet.generate_key()]).seal(Secret(b"x"), secret_location(CERTIFICATE))
                )
            },
            "cannot be opened",
        ),
        ({CERTIFICATE: SealedSecret(content=b"rubbish")}, "cannot be opened"),
    ],
)
def test_a_missing_secret_fails_its_object_only(vault, sealed, word):
    found, lost = secret_files.fill_files(
        (File(name="a", content="x"), File(name="b", secret=CERTIFICATE)), sealed, vault
    )
    assert [one.name for one in found] == ["a"]
    assert list(lost) == [SECURE]
    assert word in lost[SECURE]


LISTENER = "20000000-0000-4000-8000-00000000000f"
OTHERS = [
    secret_location(SecretName(LISTENER, Purpose.CERTIFICATE, "one")),
    secret_location(SecretName(SECURE, Purpose.CA, "one")),
    secret_location(SecretName(SECURE, Purpose.CERTIFICATE, "two")),
    secret_location(ticket_secret_name(LB)),
    amphorae.key_location("am"),
    ca_records.key_location(ca_records.CaKind.AMPHORA, b"certificate"),
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: "-".join((other.table, *other.row[1:])))
def test_a_secret_copied_from_another_row_is_not_served(vault, other):
    """An attacker with write access to the database could have other secrets sent to an own amphora."""
    copied = {CERTIFICATE: SealedSecret(content=vault.seal(Secret(MARK.encode()), other))}
    found, lost = secret_files.fill_files((File(name="b", secret=CERTIFICATE),), copied, vault)
    assert (found, list(lost)) == ((), [SECURE])
    assert "was encrypted for another row or purpose" in lost[SECURE]
    assert MARK not in lost[SECURE]


def test_a_binary_secret_fails_its_object_and_is_not_quoted(vault):
    """Python's UnicodeDecodeError contains the whole secret."""
    spoilt = {
        CERTIFICATE: SealedSecret(content=vault.seal(Secret(MARK.encode() + b"\xff"), secret_location(CERTIFICATE)))
    }
    found, lost = secret_files.fill_files((File(name="b", secret=CERTIFICATE),), spoilt, vault)
    assert (found, list(lost)) == ((), [SECURE])
    assert "not in PEM format" in lost[SECURE]
    assert MARK not in lost[SECURE]


def test_the_bundle_contains_files_pings_and_limits(vault):
    served = Served(
        text="x", files=(BundleFile(name="tls/a", content=Secret(MARK.encode())),), pings={"m": "192.0.2.1"}
    )
    document = json.loads(bundle(TREE, 8, "am", (), served))
    assert document["files"] == [{"name": "tls/a", "content": MARK}]
    assert document["pings"] == {"m": "192.0.2.1"}
    assert document["limits"] == {"connections": 500, "threads": 2, "drain": None, "workers": None}
    assert bundle(TREE, 8, "am", (), served) == bundle(TREE, 8, "am", (), served)


def test_a_pool_without_a_listener_reports_its_missing_secret(vault):
    known = SealedSecret(content=vault.seal(Secret(MARK.encode()), secret_location(CERTIFICATE)))
    authority, listeners = SecretName(CRYPTED, Purpose.CA, "ca"), {CERTIFICATE: SealedSecret(reason="gone")}
    assert secret_files.pools_without_secret(TREE, {authority: known, **listeners}) == {}, (
        "a listener reports its own secret"
    )
    assert secret_files.pools_without_secret(TREE, {authority: SealedSecret(reason="Octavia could not")}) == {
        CRYPTED: "Octavia could not"
    }


@pytest.fixture
def pushing(tmp_path, vault):
    path = tmp_path / "amphora-driver.conf"
    path.write_text("")
    nothing = dict.fromkeys(("catalogue", "agents", "authority"))
    nothing["database"] = SimpleNamespace(now=lambda: 0.0)
    running_job = Job(Lease(load_balancer_id=LB, owner="me", epoch=1, attempts=0), None, 60.0)
    backends = ReconcileContext(conf=config.load([str(path)]), vault=vault, **nothing)
    return BundlePush(backends, running_job, lambda change, applied=None: None)


def wanted(tree, sealed):
    return step_types.LoadBalancerView(
        load_balancer_id=LB,
        generation=1,
        applied=0,
        gone=False,
        readable=True,
        tree=tree,
        networks={},
        secrets=sealed,
    )


def test_a_listener_without_certificate_affects_no_other(pushing, vault, caplog):
    caplog.set_level(logging.DEBUG)
    sealed = {CERTIFICATE: SealedSecret(content=vault.seal(Secret(MARK.encode()), secret_location(CERTIFICATE)))}
    served = pushing._render(wanted(TREE, sealed), TREE)
    assert set(pushing._omitted) == {BROKEN}
    assert f"frontend {SECURE}" in served.text
    assert f"frontend {PLAIN}" in served.text
    assert f"frontend {BROKEN}" not in served.text
    assert {one.name for one in served.files} - {f"tls/{LB}/ticket.keys"} == {
        f"tls/{SECURE}/certificates.list",
        f"tls/{SECURE}/default.pem",
    }
    assert "BEGIN" not in caplog.text + repr(served) + repr(pushing._omitted)


def test_a_pool_without_its_ca_omits_no_other_object(pushing):
    """Listeners without secrets are served. A listener that Octavia has not returned is omitted."""
    leads = {"protocol": ListenerProtocol.HTTP, "loadbalancer_id": LB}
    listeners = (
        Listener(id=PLAIN, protocol_port=80, default_pool_id=POOL, **leads),
        Listener(id=SECURE, protocol_port=81, default_pool_id=CRYPTED, **leads),
        Listener(id=BROKEN, protocol_port=82, default_pool_id=POOL, unread=True, **leads),
    )
    tree = replace(TREE, listeners=listeners)
    served = pushing._render(wanted(tree, {}), tree)
    assert re.findall(r"^(?:frontend|backend) (\S+)$", served.text, re.MULTILINE) == [PLAIN, SECURE, f"{POOL}:{PLAIN}"]
    assert set(pushing._omitted) == {CRYPTED, BROKEN}
    assert "never handed over" in pushing._omitted[CRYPTED]
    assert "could not return it" in pushing._omitted[BROKEN]


def test_a_refused_policy_omits_its_listener(pushing):
    """Without the policy, HAProxy would permit what the policy forbids."""
    policy = L7Policy(id=MEMBERS[1], listener_id=PLAIN, action=L7Action.REJECT, position=1)
    tree = LoadBalancer(
        id=LB,
        project_id="demo",
        vip=VIP,
        listeners=(listener(PLAIN, 80, protocol=ListenerProtocol.HTTP, l7policies=(policy,)),),
        pools=(pool(POOL, MEMBERS[0]),),
    )
    assert f"frontend {PLAIN}" in pushing._render(wanted(tree, {}), tree).text
    pushing._omitted = {policy.id: "HAProxy does not take it"}
    assert pushing._render(wanted(tree, {}), tree).text is None
    assert set(pushing._omitted) == {policy.id, PLAIN}
