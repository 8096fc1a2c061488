# SPDX-License-Identifier: Apache-2.0
"""The Octavia reader: secrets and single objects that are read after Octavia's commit."""

import msgspec
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from dataplane.pki import Authority
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_sockets import OctaviaSockets

from amphora_driver.database.tables import job, object_status
from amphora_driver.database.vault import Vault
from amphora_driver.model.enums import Kind, ListenerProtocol
from amphora_driver.model.loadbalancer import L7Policy, Listener, LoadBalancer, Pool, Vip
from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.provider_agent import octavia_reader
from amphora_driver.provider_agent.status_reporter import Reporter
from amphora_driver.store import desired_objects, sealed_secrets, status_outbox
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.store.sealed_secrets import SealedSecret

ROOT = Authority("root")
ONE, TWO = (ROOT.issue(f"{name}.example.com") for name in ("one", "two"))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(
    id="li",
    loadbalancer_id="lb",
    protocol=ListenerProtocol.TERMINATED_HTTPS,
    protocol_port=443,
    default_tls_container_ref="one",
    sni_container_refs=("two", "one"),
)
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP)


def container(certificate, **more):
    """Return a certificate as text, because the socket carries JSON."""
    return {
        "certificate": certificate.certificate_pem,
        "private_key": certificate.key_pem,
        "passphrase": None,
        "intermediates": [],
        **more,
    }


def as_read(**more):
    values = {
        "listener_id": "li",
        "loadbalancer_id": "lb",
        "protocol": "TERMINATED_HTTPS",
        "protocol_port": 443,
        "default_tls_container_ref": "one",
        "default_tls_container_data": container(ONE),
        # In the order of Octavia's database.
        "sni_container_refs": ["one", "two"],
        "sni_container_data": [container(ONE), container(TWO)],
        "l7policies": [],
    }
    return {**values, **more}


def whole(*listeners):
    return {
        "loadbalancer_id": "lb",
        "project_id": "demo",
        "vip_address": "198.51.100.10",
        "vip_subnet_id": "s1",
        "vip_network_id": "n1",
        "vip_port_id": "p1",
        "pools": [],
        "listeners": list(listeners),
    }


@pytest.fixture
def octavia(tmp_path):
    with OctaviaSockets(tmp_path) as sockets:
        sockets.trees["lb"] = whole()
        yield sockets


@pytest.fixture(autouse=True)
def keys(tmp_path):
    """The vault that seals secrets."""
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    (tmp_path / "keys").chmod(0o600)


@pytest.fixture
def balancer(conf, database, octavia):
    return CommittedLoadBalancer(conf, database, octavia)


class CommittedLoadBalancer:
    """A load balancer that Octavia has committed, its reporter, and its known secrets."""

    def __init__(self, conf, database, octavia):
        self.database = database
        self.octavia = octavia
        self.vault = Vault.load(conf.amp_database.encryption_key_file)
        self.recorder = RequestRecorder(database, lambda node: None)
        self.reporter = Reporter(conf, database)
        self.recorder.create_load_balancer(TREE, read_back=False)
        self.reporter.run_once()

    @property
    def row(self):
        return self.database.read(lambda c: c.execute(sa.select(job)).one())

    @property
    def tree(self):
        return self.database.read(lambda c: desired_objects.load_tree(c, "lb"))

    def contents(self):
        kept = self.database.read(lambda c: sealed_secrets.load_secrets(c, "lb"))
        return {
            (name.purpose.value, name.ref): self.vault.open(one.content, sealed_secrets.secret_location(name))
            .reveal()
            .decode()
            if one.content
            else one.reason
            for name, one in kept.items()
        }

    def create(self):
        self.recorder.create_object(Kind.LISTENER, LISTENER)


def test_a_single_listener_is_read_and_keeps_the_users_sni_order(balancer):
    balancer.octavia.trees["li"] = as_read()
    balancer.create()
    assert balancer.row.read_back
    balancer.octavia.asked.clear()
    balancer.reporter.run_once()
    assert [one["object"] for one in balancer.octavia.asked] == ["listeners"], "not the whole tree"
    assert balancer.contents() == {("certificate", "one"): ONE.pem, ("certificate", "two"): TWO.pem}
    assert balancer.tree.listeners[0].sni_container_refs == ("two", "one")
    assert (balancer.row.read_back, balancer.row.reread, balancer.row.committed, balancer.row.dirty) == (
        False,
        None,
        2,
        True,
    )


def test_a_generation_is_not_committed_before_its_objects_are_read(balancer):
    """Octavia's transaction has ended, but its result is not known yet."""
    balancer.create()
    balancer.reporter._library = UnansweredReads(balancer.reporter.library)
    balancer.reporter.run_once()
    assert (balancer.row.committed, balancer.row.read_back) == (1, True)


class UnansweredReads:
    """octavia_lib's client without answers to `get`: the agent's child crashed over a secret that it cannot read."""

    def __init__(self, library):
        self.library = library
        self.asked = 0

    def __getattr__(self, name):
        if name.startswith("get_"):
            self.asked += 1
            raise octavia_errors.DriverAgentTimeout(fault_string="no answer in 30 s")
        return getattr(self.library, name)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(octavia_reader, "GIVE_UP_BACKOFF", 0.5)


def test_a_missing_secret_has_a_reason(balancer, at_once):
    balancer.create()
    balancer.reporter._library = UnansweredReads(balancer.reporter.library)
    balancer.reporter.run_once()
    assert not balancer.row.read_back
    assert balancer.row.committed == 2, "other objects can be served and reported"
    assert set(balancer.contents()) == {("certificate", "one"), ("certificate", "two")}
    assert all("could not hand it over" in reason for reason in balancer.contents().values())


def test_known_secrets_stay_without_an_answer(balancer, at_once):
    balancer.octavia.trees["li"] = as_read()
    balancer.create()
    balancer.reporter.run_once()
    before = balancer.contents()
    balancer.recorder.update_object(Kind.LISTENER, "li", {"name": "x"})
    assert balancer.row.read_back, "Octavia does not state whether SNI was emptied"
    balancer.reporter._library = UnansweredReads(balancer.reporter.library)
    balancer.reporter.run_once()
    assert balancer.contents() == before
    assert not balancer.row.read_back


def test_emptied_sni_removes_its_secrets(balancer):
    balancer.octavia.trees["li"] = as_read()
    balancer.create()
    balancer.reporter.run_once()
    balancer.octavia.trees["li"] = as_read(sni_container_refs=None, sni_container_data=None)
    balancer.recorder.update_object(Kind.LISTENER, "li", {"name": "x"})
    balancer.reporter.run_once()
    assert balancer.contents() == {("certificate", "one"): ONE.pem}
    assert balancer.tree.listeners[0].sni_container_refs is None


def test_an_unusable_secret_has_a_reason(balancer):
    strange = container(ONE, private_key=ROOT.issue("x", number=3).key_pem)
    balancer.octavia.trees["li"] = as_read(default_tls_container_data=strange, sni_container_refs=None)
    balancer.create()
    balancer.reporter.run_once()
    (reason,) = balancer.contents().values()
    assert "does not belong" in reason
    assert "default_tls_container_ref" in reason
    assert "BEGIN" not in reason


def test_a_whole_tree_is_read_with_its_secrets(balancer):
    balancer.octavia.trees["lb"] = whole(as_read(client_ca_tls_container_ref="ca", client_ca_tls_container_data=None))
    balancer.database.write(
        lambda c: sealed_secrets.replace_secrets(
            c, "lb", {SecretName("old", Purpose.CA, "old"): SealedSecret(content=b"x")}
        )
    )
    balancer.database.write(lambda c: c.execute(job.update().values(read_back=True)))
    balancer.reporter.run_once()
    found = balancer.contents()
    assert found[("certificate", "two")] == TWO.pem
    assert "returned no content" in found[("ca", "ca")]
    assert ("ca", "old") not in found


def test_an_unavailable_tree_is_an_error_and_is_read_again(balancer, at_once):
    balancer.recorder.create_object(Kind.LISTENER, PLAIN)
    balancer.database.write(lambda c: c.execute(job.update().values(read_back=True)))
    library = balancer.reporter.library
    balancer.reporter._library = UnansweredReads(library)
    balancer.reporter.run_once()
    due = balancer.database.read(lambda c: status_outbox.list_due_reports(c, 10))
    assert [(one.object_id, one.provisioning) for one in due] in ([("lb", "ERROR")], [])
    assert balancer.octavia.statuses[-1]["loadbalancers"][0]["provisioning_status"] == "ERROR"
    assert balancer.row.read_back, "an incomplete tree is not served"
    balancer.reporter._library = library
    balancer.reporter._reader.retries.clear()
    balancer.reporter.run_once()
    assert not balancer.row.read_back


class PartialReads:
    """octavia_lib's client that returns the given listeners and pools only."""

    def __init__(self, library, *readable):
        self.update_loadbalancer_status = library.update_loadbalancer_status
        self._library = library
        self._readable = readable

    def get_loadbalancer(self, _):
        raise octavia_errors.DriverAgentTimeout(fault_string="no answer in 30 s")

    def get_listener(self, one):
        return self._library.get_listener(one) if one in self._readable else self.get_loadbalancer(one)

    def get_pool(self, one):
        return self._library.get_pool(one) if one in self._readable else self.get_loadbalancer(one)


PLAIN = Listener(id="plain", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80)


def two_listeners(balancer):
    balancer.octavia.trees["plain"] = as_read(
        listener_id="plain",
        protocol="HTTP",
        protocol_port=80,
        default_tls_container_ref=None,
        sni_container_refs=None,
        l7policies=[{"l7policy_id": "po", "listener_id": "plain", "action": "REJECT", "position": 1, "rules": []}],
    )
    balancer.octavia.trees["li"] = as_read()
    balancer.recorder.create_object(Kind.LISTENER, PLAIN)
    balancer.create()
    balancer.reporter.run_once()
    balancer.database.write(lambda c: c.execute(job.update().values(read_back=True, reread=None)))
    balancer.recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": "x"})


def test_an_unreadable_listener_does_not_block_the_others(balancer, at_once):
    two_listeners(balancer)
    balancer.reporter._library = PartialReads(balancer.reporter.library, "plain")
    balancer.reporter.run_once()
    assert not balancer.row.read_back
    found = {one.id: (len(one.l7policies), one.unread) for one in balancer.tree.listeners}
    assert found == {"plain": (1, False), "li": (0, True)}


def test_an_unreadable_object_without_secrets_blocks_the_load_balancer(balancer, at_once):
    """Without secrets the cause is unknown and may concern the whole load balancer."""
    two_listeners(balancer)
    balancer.reporter._library = PartialReads(balancer.reporter.library, "li")
    balancer.reporter.run_once()
    assert balancer.row.read_back, "the policies of the listener are not known"
    assert balancer.octavia.statuses[-1]["loadbalancers"][0]["provisioning_status"] == "ERROR"


POLICY = {"l7policy_id": "po", "listener_id": "plain", "action": "REJECT", "position": 1, "rules": []}
AS_READ = {"loadbalancer_id": "lb", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "name": "as read"}


def read_with_an_unreadable_pool(balancer, **more):
    """Octavia returns a listener together with its pools and their secrets, or not at all."""
    for name, secret in (("open", {}), ("closed", {"tls_enabled": True, "ca_tls_container_ref": "ca"})):
        pool = Pool(id=name, loadbalancer_id="lb", protocol="HTTP", lb_algorithm="ROUND_ROBIN", **secret)
        balancer.recorder.create_object(Kind.POOL, pool)
        balancer.octavia.trees[name] = {"pool_id": name, **AS_READ, **secret}
    balancer.recorder.create_object(Kind.LISTENER, msgspec.structs.replace(PLAIN, default_pool_id="closed", **more))
    balancer.recorder.create_object(Kind.LISTENER, msgspec.structs.replace(PLAIN, id="other", default_pool_id="open"))
    for name, leads_to, policies in (("plain", "closed", [POLICY]), ("other", "open", [])):
        balancer.octavia.trees[name] = {
            "listener_id": name,
            "loadbalancer_id": "lb",
            "protocol": "HTTP",
            "protocol_port": 80,
            "default_pool_id": leads_to,
            "l7policies": policies,
        }
    balancer.database.write(lambda c: c.execute(job.update().values(read_back=True, reread=None)))
    library = balancer.reporter.library
    balancer.reporter._library = PartialReads(library, "open", "other")
    balancer.reporter.run_once()
    return library


def test_a_listener_with_an_unreadable_pool_blocks_no_other_object(balancer, at_once):
    read_with_an_unreadable_pool(balancer)
    assert not balancer.row.read_back
    assert {one.id: one.name for one in balancer.tree.pools} == {"open": "as read", "closed": None}
    assert {one.id: one.unread for one in balancer.tree.listeners} == {"plain": True, "other": False}
    assert all("could not hand it over" in reason for reason in balancer.contents().values())
    assert set(balancer.contents()) == {("ca", "ca")}, "the missing secret omits the pool"
    said = [one for document in balancer.octavia.statuses for one in document.get("loadbalancers", ())]
    assert not [one for one in said if one.get("provisioning_status") == "ERROR"], "other objects can be served"


def test_a_listener_with_an_unrenderable_policy_is_omitted(balancer, at_once):
    policy = L7Policy(id="po", listener_id="plain", action="REDIRECT_TO_POOL", redirect_pool_id="open", position=1)
    read_with_an_unreadable_pool(balancer, l7policies=(policy,))
    assert [one.id for one in balancer.tree.listeners if one.unread] == ["plain"]


def repair_pool(balancer):
    """The user refers to a CA that Octavia can read."""
    balancer.octavia.trees["closed"].update(ca_tls_container_ref="new", ca_tls_container_data=ROOT.pem)
    names = ("open", "closed")
    balancer.octavia.trees["lb"] = {
        **whole(balancer.octavia.trees["plain"], balancer.octavia.trees["other"]),
        "pools": [balancer.octavia.trees[name] for name in names],
    }
    balancer.recorder.update_object(Kind.POOL, "closed", {"ca_tls_container_ref": "new"})


def test_a_missing_secret_is_read_after_its_cause_ends(balancer, at_once):
    balancer.reporter._library = read_with_an_unreadable_pool(balancer)
    balancer.recorder.update_object(Kind.POOL, "open", {"name": "x"})
    assert not balancer.row.read_back, "this change does not affect the cause"
    repair_pool(balancer)
    balancer.reporter.run_once()
    assert {one.id: (one.unread, len(one.l7policies)) for one in balancer.tree.listeners} == {
        "plain": (False, 1),
        "other": (False, 0),
    }
    assert balancer.contents() == {("ca", "new"): ROOT.pem}


def test_an_audit_notices_a_secret_that_becomes_readable(balancer, at_once):
    """The user grants access to the secret without a request to the load balancer."""
    balancer.reporter._library = read_with_an_unreadable_pool(balancer)
    balancer.octavia.trees["closed"]["ca_tls_container_data"] = ROOT.pem
    trees = balancer.octavia.trees
    trees["lb"] = {**whole(trees["plain"], trees["other"]), "pools": [trees["open"], trees["closed"]]}
    balancer.database.write(
        lambda c: c.execute(object_status.update().values(pending=None, reported=object_status.c.settled))
    )
    assert balancer.reporter._auditor.compare("lb")
    assert {one.id: (one.unread, len(one.l7policies)) for one in balancer.tree.listeners} == {
        "plain": (False, 1),
        "other": (False, 0),
    }
    assert balancer.contents() == {("ca", "ca"): ROOT.pem}


def test_the_deletion_of_the_unreadable_pool_causes_a_read(balancer, at_once):
    read_with_an_unreadable_pool(balancer)
    balancer.recorder.delete_object(Kind.POOL, "closed")
    assert (balancer.row.read_back, balancer.row.reread) == (True, None)


def test_a_change_of_an_unread_listener_reads_the_whole_tree(balancer, at_once):
    """A read of the listener alone would lose its policies."""
    read_with_an_unreadable_pool(balancer)
    balancer.recorder.update_object(Kind.LISTENER, "plain", {"default_pool_id": "open"})
    assert (balancer.row.read_back, balancer.row.reread) == (True, None)


def test_known_secrets_survive_a_complete_read(balancer, at_once):
    """A secret of another listener is unavailable meanwhile: the known secrets stay in use."""
    library = read_with_an_unreadable_pool(balancer)
    balancer.octavia.trees["li"] = as_read()
    balancer.create()
    balancer.reporter._library = PartialReads(library, "li")
    balancer.reporter.run_once()
    before = {name: one for name, one in balancer.contents().items() if name[0] == "certificate"}
    repair_pool(balancer)
    balancer.reporter._library = PartialReads(library, "open", "closed", "plain", "other")
    balancer.reporter.run_once()
    assert not balancer.row.read_back
    assert [one.id for one in balancer.tree.listeners if one.unread] == []
    assert len(before) == 2
    assert before.items() <= balancer.contents().items()


def test_a_complete_object_is_committed_without_a_read(balancer, at_once):
    balancer.database.write(lambda c: c.execute(job.update().values(committed=0)))
    balancer.reporter._library = PartialReads(balancer.reporter.library)
    balancer.reporter.run_once()
    assert balancer.row.committed == 1


def test_a_deletion_needs_no_read(balancer):
    balancer.create()
    balancer.recorder.delete_load_balancer("lb")
    assert (balancer.row.read_back, balancer.contents()) == (False, {})
