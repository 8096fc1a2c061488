# SPDX-License-Identifier: Apache-2.0
"""Secrets and single objects that Octavia is asked for after its commit."""

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
    """As it comes through the socket: JSON, so text."""
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
    sockets = OctaviaSockets(tmp_path)
    sockets.trees["lb"] = whole()
    sockets.start()
    yield sockets
    sockets.stop()


@pytest.fixture(autouse=True)
def keys(tmp_path):
    """What seals secrets."""
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    (tmp_path / "keys").chmod(0o600)


@pytest.fixture
def house(conf, database, octavia):
    return House(conf, database, octavia)


class House:
    """A load balancer that Octavia has committed, its reporter, and what is known of its secrets."""

    def __init__(self, conf, database, octavia):
        self.database = database
        self.octavia = octavia
        self.vault = Vault.load(conf.amp_database.encryption_key_file)
        self.intents = RequestRecorder(database, lambda node: None)
        self.reporter = Reporter(conf, database)
        self.intents.create_load_balancer(TREE, read_back=False)
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
        self.intents.create_object(Kind.LISTENER, LISTENER)


def test_a_listener_alone_is_read_and_keeps_the_users_order(house):
    house.octavia.trees["li"] = as_read()
    house.create()
    assert house.row.read_back
    house.octavia.asked.clear()
    house.reporter.run_once()
    assert [one["object"] for one in house.octavia.asked] == ["listeners"], "not the whole tree"
    assert house.contents() == {("certificate", "one"): ONE.pem, ("certificate", "two"): TWO.pem}
    assert house.tree.listeners[0].sni_container_refs == ("two", "one")
    assert (house.row.read_back, house.row.reread, house.row.committed, house.row.dirty) == (False, None, 2, True)


def test_nothing_is_committed_before_it_was_read(house):
    """Octavia's transaction is known to have ended, what it has written is not."""
    house.create()
    house.reporter._library = Away(house.reporter.library)
    house.reporter.run_once()
    assert (house.row.committed, house.row.read_back) == (1, True)


class Away:
    """octavia_lib's client, with a `get` that is not answered: the agent's child died over a secret it cannot read."""

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


def test_a_missing_secret_has_a_reason(house, at_once):
    house.create()
    house.reporter._library = Away(house.reporter.library)
    house.reporter.run_once()
    assert not house.row.read_back
    assert house.row.committed == 2, "the rest can be served and spoken of"
    assert set(house.contents()) == {("certificate", "one"), ("certificate", "two")}
    assert all("could not hand it over" in reason for reason in house.contents().values())


def test_known_secrets_stay_without_an_answer(house, at_once):
    house.octavia.trees["li"] = as_read()
    house.create()
    house.reporter.run_once()
    before = house.contents()
    house.intents.update_object(Kind.LISTENER, "li", {"name": "x"})
    assert house.row.read_back, "perhaps SNI was emptied: Octavia does not say so"
    house.reporter._library = Away(house.reporter.library)
    house.reporter.run_once()
    assert house.contents() == before
    assert not house.row.read_back


def test_sni_that_was_emptied_is_gone(house):
    house.octavia.trees["li"] = as_read()
    house.create()
    house.reporter.run_once()
    house.octavia.trees["li"] = as_read(sni_container_refs=None, sni_container_data=None)
    house.intents.update_object(Kind.LISTENER, "li", {"name": "x"})
    house.reporter.run_once()
    assert house.contents() == {("certificate", "one"): ONE.pem}
    assert house.tree.listeners[0].sni_container_refs is None


def test_an_unusable_secret_is_the_reason(house):
    strange = container(ONE, private_key=ROOT.issue("x", number=3).key_pem)
    house.octavia.trees["li"] = as_read(default_tls_container_data=strange, sni_container_refs=None)
    house.create()
    house.reporter.run_once()
    (reason,) = house.contents().values()
    assert "does not belong" in reason
    assert "default_tls_container_ref" in reason
    assert "BEGIN" not in reason


def test_a_whole_tree_brings_its_secrets(house):
    house.octavia.trees["lb"] = whole(as_read(client_ca_tls_container_ref="ca", client_ca_tls_container_data=None))
    house.database.write(
        lambda c: sealed_secrets.replace_secrets(
            c, "lb", {SecretName("old", Purpose.CA, "old"): SealedSecret(content=b"x")}
        )
    )
    house.database.write(lambda c: c.execute(job.update().values(read_back=True)))
    house.reporter.run_once()
    found = house.contents()
    assert found[("certificate", "two")] == TWO.pem
    assert "returned no content" in found[("ca", "ca")]
    assert ("ca", "old") not in found


def test_a_tree_that_does_not_come_is_an_error_and_asked_for_again(house, at_once):
    house.intents.create_object(Kind.LISTENER, PLAIN)
    house.database.write(lambda c: c.execute(job.update().values(read_back=True)))
    library = house.reporter.library
    house.reporter._library = Away(library)
    house.reporter.run_once()
    due = house.database.read(lambda c: status_outbox.list_due_reports(c, 10))
    assert [(one.object_id, one.provisioning) for one in due] in ([("lb", "ERROR")], [])
    assert house.octavia.statuses[-1]["loadbalancers"][0]["provisioning_status"] == "ERROR"
    assert house.row.read_back, "half a tree is not served"
    house.reporter._library = library
    house.reporter._reader.retries.clear()
    house.reporter.run_once()
    assert not house.row.read_back


class Partly:
    """octavia_lib's client, which hands over these listeners and pools, and nothing else."""

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


def two_listeners(house):
    house.octavia.trees["plain"] = as_read(
        listener_id="plain",
        protocol="HTTP",
        protocol_port=80,
        default_tls_container_ref=None,
        sni_container_refs=None,
        l7policies=[{"l7policy_id": "po", "listener_id": "plain", "action": "REJECT", "position": 1, "rules": []}],
    )
    house.octavia.trees["li"] = as_read()
    house.intents.create_object(Kind.LISTENER, PLAIN)
    house.create()
    house.reporter.run_once()
    house.database.write(lambda c: c.execute(job.update().values(read_back=True, reread=None)))
    house.intents.update_object(Kind.LOAD_BALANCER, "lb", {"name": "x"})


def test_a_listener_that_is_not_handed_over_costs_no_other(house, at_once):
    two_listeners(house)
    house.reporter._library = Partly(house.reporter.library, "plain")
    house.reporter.run_once()
    assert not house.row.read_back
    found = {one.id: (len(one.l7policies), one.unread) for one in house.tree.listeners}
    assert found == {"plain": (1, False), "li": (0, True)}


def test_an_object_without_secrets_must_be_complete(house, at_once):
    """Nothing says why it does not: that is no matter of one object's."""
    two_listeners(house)
    house.reporter._library = Partly(house.reporter.library, "li")
    house.reporter.run_once()
    assert house.row.read_back, "its policies are not known"
    assert house.octavia.statuses[-1]["loadbalancers"][0]["provisioning_status"] == "ERROR"


POLICY = {"l7policy_id": "po", "listener_id": "plain", "action": "REJECT", "position": 1, "rules": []}
AS_READ = {"loadbalancer_id": "lb", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "name": "as read"}


def behind_a_pool_without_its_secret(house, **more):
    """Octavia hands a listener over with its pools, and so with their secrets, or not at all."""
    for name, secret in (("open", {}), ("closed", {"tls_enabled": True, "ca_tls_container_ref": "ca"})):
        pool = Pool(id=name, loadbalancer_id="lb", protocol="HTTP", lb_algorithm="ROUND_ROBIN", **secret)
        house.intents.create_object(Kind.POOL, pool)
        house.octavia.trees[name] = {"pool_id": name, **AS_READ, **secret}
    house.intents.create_object(Kind.LISTENER, msgspec.structs.replace(PLAIN, default_pool_id="closed", **more))
    house.intents.create_object(Kind.LISTENER, msgspec.structs.replace(PLAIN, id="other", default_pool_id="open"))
    for name, leads_to, policies in (("plain", "closed", [POLICY]), ("other", "open", [])):
        house.octavia.trees[name] = {
            "listener_id": name,
            "loadbalancer_id": "lb",
            "protocol": "HTTP",
            "protocol_port": 80,
            "default_pool_id": leads_to,
            "l7policies": policies,
        }
    house.database.write(lambda c: c.execute(job.update().values(read_back=True, reread=None)))
    library = house.reporter.library
    house.reporter._library = Partly(library, "open", "other")
    house.reporter.run_once()
    return library


def test_a_listener_that_leads_to_what_cannot_be_served_costs_nothing_else(house, at_once):
    behind_a_pool_without_its_secret(house)
    assert not house.row.read_back
    assert {one.id: one.name for one in house.tree.pools} == {"open": "as read", "closed": None}
    assert {one.id: one.unread for one in house.tree.listeners} == {"plain": True, "other": False}
    assert all("could not hand it over" in reason for reason in house.contents().values())
    assert set(house.contents()) == {("ca", "ca")}, "the pool is left out for that"
    said = [one for document in house.octavia.statuses for one in document.get("loadbalancers", ())]
    assert not [one for one in said if one.get("provisioning_status") == "ERROR"], "the rest can be served"


def test_listener_with_an_unrenderable_reject_policy_is_omitted(house, at_once):
    policy = L7Policy(id="po", listener_id="plain", action="REDIRECT_TO_POOL", redirect_pool_id="open", position=1)
    behind_a_pool_without_its_secret(house, l7policies=(policy,))
    assert [one.id for one in house.tree.listeners if one.unread] == ["plain"]


def mended(house):
    """The user refers to an authority that can be read."""
    house.octavia.trees["closed"].update(ca_tls_container_ref="new", ca_tls_container_data=ROOT.pem)
    names = ("open", "closed")
    house.octavia.trees["lb"] = {
        **whole(house.octavia.trees["plain"], house.octavia.trees["other"]),
        "pools": [house.octavia.trees[name] for name in names],
    }
    house.intents.update_object(Kind.POOL, "closed", {"ca_tls_container_ref": "new"})


def test_a_missing_secret_is_read_after_its_cause_ends(house, at_once):
    house.reporter._library = behind_a_pool_without_its_secret(house)
    house.intents.update_object(Kind.POOL, "open", {"name": "x"})
    assert not house.row.read_back, "that was not the reason"
    mended(house)
    house.reporter.run_once()
    assert {one.id: (one.unread, len(one.l7policies)) for one in house.tree.listeners} == {
        "plain": (False, 1),
        "other": (False, 0),
    }
    assert house.contents() == {("ca", "new"): ROOT.pem}


def test_a_secret_that_comes_back_is_noticed_without_a_word(house, at_once):
    """Its user let us read it, and asked nothing of the load balancer."""
    house.reporter._library = behind_a_pool_without_its_secret(house)
    house.octavia.trees["closed"]["ca_tls_container_data"] = ROOT.pem
    trees = house.octavia.trees
    trees["lb"] = {**whole(trees["plain"], trees["other"]), "pools": [trees["open"], trees["closed"]]}
    house.database.write(
        lambda c: c.execute(object_status.update().values(pending=None, reported=object_status.c.settled))
    )
    assert house.reporter._auditor.compare("lb")
    assert {one.id: (one.unread, len(one.l7policies)) for one in house.tree.listeners} == {
        "plain": (False, 1),
        "other": (False, 0),
    }
    assert house.contents() == {("ca", "ca"): ROOT.pem}


def test_removing_the_reason_is_as_good(house, at_once):
    behind_a_pool_without_its_secret(house)
    house.intents.delete_object(Kind.POOL, "closed")
    assert (house.row.read_back, house.row.reread) == (True, None)


def test_a_listener_that_is_changed_is_asked_for_with_everything_it_has(house, at_once):
    """Read alone, its policies would be forgotten."""
    behind_a_pool_without_its_secret(house)
    house.intents.update_object(Kind.LISTENER, "plain", {"default_pool_id": "open"})
    assert (house.row.read_back, house.row.reread) == (True, None)


def test_known_secrets_survive_a_complete_read(house, at_once):
    """Another one's secret is away meanwhile: what is served stays served."""
    library = behind_a_pool_without_its_secret(house)
    house.octavia.trees["li"] = as_read()
    house.create()
    house.reporter._library = Partly(library, "li")
    house.reporter.run_once()
    before = {name: one for name, one in house.contents().items() if name[0] == "certificate"}
    mended(house)
    house.reporter._library = Partly(library, "open", "closed", "plain", "other")
    house.reporter.run_once()
    assert not house.row.read_back
    assert [one.id for one in house.tree.listeners if one.unread] == []
    assert len(before) == 2
    assert before.items() <= house.contents().items()


def test_a_complete_object_does_not_wait(house, at_once):
    house.database.write(lambda c: c.execute(job.update().values(committed=0)))
    house.reporter._library = Partly(house.reporter.library)
    house.reporter.run_once()
    assert house.row.committed == 1


def test_deletion_wants_to_know_nothing_any_more(house):
    house.create()
    house.intents.delete_load_balancer("lb")
    assert (house.row.read_back, house.contents()) == (False, {})
