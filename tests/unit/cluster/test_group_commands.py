# SPDX-License-Identifier: Apache-2.0
"""`amphoractl group …` with a real database; Octavia is replaced where a command calls it."""

import importlib
import io
import json
import logging
import threading
import time

import msgspec
import pytest
from cliff.commandmanager import CommandManager
from cryptography.fernet import Fernet
from group_cli import Octavia, run_amphoractl

from amphora_cluster import config
from amphora_cluster.cli import definition
from amphora_cluster.cloud.errors import CredentialRefused
from amphora_cluster.cloud.octavia import LoadBalancerIds
from amphora_cluster.database.claims import Claims, PassEnd
from amphora_cluster.database.passes import PassStore
from amphora_cluster.database.requests import StoredRequest
from amphora_cluster.model import (
    Criterion,
    Member,
    Node,
    NodeState,
    RequestKind,
    Selector,
    SelectorKind,
    WeightKind,
)
from amphora_cluster.policy import from_mapping
from amphora_driver.cli.main import COMMANDS, Amphoractl
from amphora_driver.database.vault import Vault
from amphora_driver.errors import ConfigurationError, StoreError

SUBNET, VIP = "5b000000-0000-4000-8000-000000000001", "5b000000-0000-4000-8000-000000000002"
POLICY = {"pool": {"subnet": SUBNET, "protocol_port": 8080}, "vip": {"subnet": VIP, "protocol_port": 80}}
POOL = ("--load-balancer", "lb", "--pool", "pool")


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Restore the root logger: cliff adds a handler for its standard error, which a test closes."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def octavia(monkeypatch):
    made = Octavia()
    monkeypatch.setattr(definition, "connect", made)
    return made


@pytest.fixture
def stores(sqlite_cluster, make_stores, tmp_path):
    made = make_stores(sqlite_cluster)
    made.vault = Vault([(key := Fernet.generate_key())])
    made.groups._vault = made.tokens._vault = made.vault
    (tmp_path / "keys").write_bytes(key)
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "cluster.conf").write_text(
        f"[amp_cluster]\nconnection = {sqlite_cluster.url}\nencryption_key_file = {tmp_path}/keys\n"
    )
    return made


@pytest.fixture
def run(stores, tmp_path, octavia):
    """Return a function that runs a command line and returns its JSON output, if any."""

    def run(*words, fails=False):
        status, out, err = run_amphoractl(tmp_path / "cluster.conf", "group", *words)
        assert (status != 0) is fails, err
        return err if fails else json.loads(out) if "json" in words else out

    return run


@pytest.fixture
def credential_file(tmp_path):
    path = tmp_path / "credential.json"
    path.write_text(json.dumps({"id": "c1", "name": "n", "secret": "hush-hush", "project_id": "p7"}))
    path.chmod(0o600)
    return path


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(POLICY))
    return path


def test_a_group_is_created_shown_and_listed(run, stores, octavia, credential_file):
    words = ("--metadata", "role=web", *POOL, "--port", "80", "--port", "81", "--minimum", "2", "--weight", "3")
    made = run("create", "web", *words, "--credential-file", str(credential_file), "-f", "json")
    record = stores.groups.get(made["ID"])
    group = record.group
    assert (group.selector.kind, group.selector.value) == (SelectorKind.METADATA, "role=web")
    assert (group.member.ports, group.member.weight.number, group.minimum) == ((80, 81), 3, 2)
    assert (group.load_balancer_id, group.pool_id, group.owns_load_balancer) == ("lb", "pool", False)
    assert (group.project_id, octavia.project_id, octavia.credential.id) == ("p7", "p7", "c1")
    assert made["State"] == "new"
    (claim,) = Claims(stores.database, "one", 30).claim()
    nodes = (
        Node(server_id="s1", state=NodeState.UNHEALTHY, since=1.0, reason="Member m1 is in ERROR."),
        Node(server_id="s2", state=NodeState.DRAINING, since=1.0, leaving=True),
    )
    (loaded,) = stores.passes.load([claim])
    assert stores.groups.open_credential(group.id, loaded.credential).secret.reveal() == b"hush-hush"
    stores.passes.finish(PassEnd(claim=claim, due_at=0.0), (), nodes)
    shown = run("show", "web", "-f", "json")
    assert [one["server_id"] for one in shown["Servers"]] == ["s1", "s2"]
    assert shown["Servers"][0]["reason"] == "Member m1 is in ERROR."
    text = run("show", made["ID"][:8])
    assert "s1 unhealthy since" in text
    assert "s2 draining, leaving since" in text
    assert "hush" not in text
    (row,) = run("list", "-f", "json")
    assert (row["Name"], row["Servers"], row["State"]) == ("web", {"draining": 1, "unhealthy": 1}, "working")
    assert run("list", "--project", "p8", "-f", "json") == []
    events = run("event", "list", "web", "-f", "json")
    assert {(one["Server"], one["State"]) for one in events} == {("s1", "unhealthy"), ("s2", "draining")}


@pytest.mark.parametrize(
    ("words", "kind", "value"),
    [
        (("--server-group", "sg1"), SelectorKind.SERVER_GROUP, "sg1"),
        (("--tag", "web"), SelectorKind.TAG, "web"),
        (("--heat-stack", "shop/web"), SelectorKind.HEAT_STACK, "shop/web"),
        (("--server", "s1", "--server", "s2", "--server", "s1"), SelectorKind.LIST, ("s1", "s2")),
    ],
)
def test_every_selector(run, stores, credential_file, words, kind, value):
    more = ("--port", "80", "--weight-metadata", "w", "--credential-file", str(credential_file))
    made = run("create", "web", *words, *POOL, *more, "-f", "json")
    group = stores.groups.get(made["ID"]).group
    assert (group.selector.kind, group.selector.servers or group.selector.value) == (kind, value)
    assert (group.member.weight.kind, group.member.weight.key) == (WeightKind.METADATA, "w")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "0 selectors are given"),
        (("--tag", "a", "--server", "b"), "2 selectors are given"),
        (("--metadata", "role"), "'role' is not KEY=VALUE"),
        (("--heat-stack", "shop"), "'shop' is not STACK/RESOURCE"),
    ],
)
def test_a_wrong_selector_is_refused(run, words, error, credential_file):
    more = (*POOL, "--port", "80", "--credential-file", str(credential_file))
    assert error in run("create", "web", *words, *more, fails=True)


def test_missing_arguments_are_refused(run, credential_file):
    credential = ("--credential-file", str(credential_file))
    assert "no port is given" in run("create", "web", "--tag", "a", *POOL, *credential, fails=True)
    assert "no pool is given" in run("create", "web", "--tag", "a", "--port", "80", *credential, fails=True)
    refused = run("create", "web", "--tag", "a", "--port", "80", *POOL, fails=True)
    assert "no application credential is given" in refused


def test_a_policy_creates_the_load_balancer(run, stores, octavia, credential_file, policy_file):
    words = ("--tag", "web", "--policy", str(policy_file), "--credential-file", str(credential_file))
    made = run("create", "web", *words, "-f", "json")
    group = stores.groups.get(made["ID"]).group
    assert (group.load_balancer_id, group.pool_id, group.owns_load_balancer) == ("lb9", "pool9", True)
    assert (group.member.ports, group.member.subnet_id) == ((8080,), SUBNET)
    ((group_id, body),) = octavia.made
    assert group_id == group.id
    assert (body["vip_subnet_id"], body["listeners"][0]["protocol_port"]) == (VIP, 80)
    assert body["listeners"][0]["tags"] == [group.tag]
    assert "a policy and a pool are given" in run("create", "two", *words, "--pool", "p", fails=True)
    assert from_mapping(POLICY).creates_load_balancer


def test_the_load_balancer_of_a_refused_group_is_deleted(run, octavia, credential_file, policy_file):
    octavia.error = CredentialRefused("read pool", "no right", final=True)
    words = ("--tag", "web", "--policy", str(policy_file), "--credential-file", str(credential_file))
    assert "no right" in run("create", "web", *words, fails=True)
    assert octavia.deleted == [(octavia.made[0][0], "lb9")]


def test_a_repeated_creation_never_deletes_the_load_balancer(run, stores, octavia, credential_file, policy_file):
    new = "0a000000-0000-4000-8000-000000000002"
    words = ("--tag", "web", "--policy", str(policy_file), "--credential-file", str(credential_file), "--id", new)
    run("create", "web", *words)
    assert f"group {new} with the name web exists" in run("create", "other", *words, fails=True)
    assert "with the name web exists" in run("create", "web", *words[:-2], fails=True)
    assert (len(octavia.made), octavia.deleted) == (1, [])


def test_the_load_balancer_of_an_earlier_attempt_stays(run, octavia, credential_file, policy_file):
    octavia.error, octavia.made = CredentialRefused("read pool", "no right", final=True), ["the earlier attempt"]
    new = "0a000000-0000-4000-8000-000000000002"
    words = ("--tag", "web", "--policy", str(policy_file), "--credential-file", str(credential_file), "--id", new)
    assert f"Load balancer lb9 stays. Repeat the command with --id {new}" in run("create", "web", *words, fails=True)
    assert octavia.deleted == []


def test_the_load_balancer_stays_if_the_group_may_be_recorded(stores, octavia, monkeypatch):
    made = LoadBalancerIds(load_balancer_id="lb9", pool_id="pool9")
    group = stores.add()
    assert definition.undo_load_balancer(octavia, stores.groups, group.id, made) == " Group g1 is recorded."

    def fail(_):
        raise StoreError("read from the database", "no answer")

    monkeypatch.setattr(stores.groups, "get", fail)
    assert "Load balancer lb9 stays" in definition.undo_load_balancer(octavia, stores.groups, "g2", made)
    assert octavia.deleted == []


NAMED = {"pool": {"subnet": "my-subnet", "id": SUBNET}, "loadbalancer": VIP}


@pytest.mark.parametrize(
    ("document", "more", "error"),
    [
        ({"pool": {"subnet": "my-subnet"}, "vip": {"subnet": VIP}}, (), "'my-subnet' is no id"),
        ({"pool": {"subnet": SUBNET}, "vip": {"network": "net"}}, (), "openstack network show NAME"),
        (NAMED, (), "'my-subnet' is no id"),
        ({**NAMED, "pool": {"subnet": SUBNET, "id": SUBNET}, "loadbalancer": "lb"}, (), "openstack loadbalancer show"),
        (POLICY, ("--subnet", "private"), "'private' is no id"),
    ],
)
def test_names_are_refused(run, credential_file, policy_file, octavia, document, more, error):
    policy_file.write_text(json.dumps(document))
    words = ("--tag", "web", "--policy", str(policy_file), "--credential-file", str(credential_file), *more)
    assert error in run("create", "web", *words, fails=True)
    assert octavia.made == []


def test_ids_of_servers_have_the_form_of_nova(run, stores, capsys):
    stores.add(selector=Selector(kind=SelectorKind.LIST, servers=("s1",)))
    run("set", "g1", "--add-server", "S2", "--remove-server", "S1")
    assert stores.groups.get("g1").group.selector.servers == ("s2",)
    for words in (("set", "g1", "--add-server", "a/b"), ("leave", "g1", "a" * 65)):
        with pytest.raises(SystemExit):
            run(*words)
        assert "is no id of a server" in capsys.readouterr().err


def test_a_pool_with_members_of_the_same_tag_is_refused(run, octavia, credential_file):
    values = {"name": "s", "address": "192.0.2.1", "port": 80, "weight": 1, "subnet_id": None, "monitor_port": None}
    states = {"backup": False, "operating_status": "ONLINE", "provisioning_status": "ACTIVE"}
    new = "0a000000-0000-4000-8000-000000000001"
    member = Member(id="m", tags=(f"amphora-cluster:{new}",), **values, **states)
    octavia.pool = msgspec.structs.replace(octavia.pool, members=(member,))
    words = ("--tag", "a", *POOL, "--port", "80", "--credential-file", str(credential_file))
    assert "have the tag" in run("create", "web", *words, "--id", new, fails=True)


@pytest.mark.parametrize(
    ("content", "mode", "error"),
    [
        ("{}", 0o600, "is not JSON with the keys id and secret"),
        ('{"id": "hush", "secret": 5}', 0o600, "is not JSON with the keys id and secret"),
        ('{"id": "c", "secret": "hush"}', 0o604, "other users have access"),
        ('{"id": "c", "secret": "hush"}', 0o600, "the file names no project"),
    ],
)
def test_an_unusable_credential_file_is_refused(run, credential_file, content, mode, error):
    credential_file.write_text(content)
    credential_file.chmod(mode)
    words = ("--tag", "a", *POOL, "--port", "80", "--credential-file", str(credential_file))
    found = run("create", "web", *words, fails=True)
    assert error in found
    assert "hush" not in found


def test_a_pool_of_another_load_balancer_is_refused(run, octavia, credential_file, stores):
    words = ("--tag", "web", "--load-balancer", "other", "--pool", "pool", "--port", "80")
    error = run("create", "web", *words, "--credential-file", str(credential_file), fails=True)
    assert "pool pool belongs to load balancer lb, not to other" in error
    assert "Use --load-balancer lb." in error
    assert stores.groups.list_groups() == ()


def test_a_credential_of_another_project_is_refused(run, octavia, credential_file, stores):
    words = ("--tag", "web", *POOL, "--port", "80", "--credential-file", str(credential_file))
    run("create", "web", *words)
    before = stores.groups.find("web").group
    octavia.foreign = ConfigurationError("use the application credential", "it belongs to project p8", "Create one.")
    for line in (("create", "more", *words), ("set", "web", "--credential-file", str(credential_file))):
        assert "it belongs to project p8" in run(*line, fails=True)
    assert [one.group for one in stores.groups.list_groups()] == [before]


def test_a_credential_is_read_from_standard_input(run, stores, monkeypatch):
    text = io.TextIOWrapper(io.BytesIO(b'{"id": "c5", "secret": "hush"}'))
    monkeypatch.setattr("sys.stdin", text)
    words = ("--tag", "a", *POOL, "--port", "80", "--credential-file", "-", "--project", "p2")
    made = run("create", "web", *words, "-f", "json")
    assert stores.groups.get(made["ID"]).group.project_id == "p2"


def test_a_group_is_changed(run, stores, octavia, credential_file):
    group = stores.add(selector=stores.add("other").selector.__class__(kind=SelectorKind.LIST, servers=("s1", "s2")))
    words = (
        "--add-server",
        "s3",
        "--remove-server",
        "s1",
        "--drain-seconds",
        "0",
        "--name",
        "new",
        "--load-metadata",
        "load",
    )
    run("set", "g1", *words, "--credential-file", str(credential_file))
    found = stores.groups.get("g1").group
    assert (found.selector.servers, found.drain_seconds, found.name) == (("s2", "s3"), 0, "new")
    assert (found.minimum, found.load_metadata) == (group.minimum, "load")
    assert "finds its servers by a selector" in run("set", "other", "--add-server", "s1", fails=True)
    octavia.error = CredentialRefused("read pool", "revoked", final=True)
    assert "revoked" in run("set", "g1", "--credential-file", str(credential_file), fails=True)


def test_a_group_is_deleted_by_a_controller_or_by_force(run, stores):
    stores.add("g1")
    stores.add("g2")
    assert "deleting" in run("delete", "g1")
    assert run("show", "g1", "-f", "json")["State"] == "deleting"
    run("delete", "g2", "--force")
    assert "no group has this name or id" in run("show", "g2", fails=True)


class Controller(threading.Thread):
    """Ends each request with an outcome, as a controller does."""

    def __init__(self, stores, outcome, refusal=""):
        super().__init__(daemon=True)
        self.stores, self.outcome, self.refusal, self.stopping = stores, outcome, refusal, threading.Event()
        self.seen = []

    def run(self):
        claims, passes = Claims(self.stores.database, "one", 30), PassStore(self.stores.database)
        while not self.stopping.wait(0.02):
            for claim in claims.claim():
                (loaded,) = passes.load([claim])
                self.seen += [one.request for one in loaded.requests]
                ended = [StoredRequest(request=self._end(one.request), applied=True) for one in loaded.requests]
                passes.finish(PassEnd(claim=claim, due_at=time.time() + 60), (), (), ended)

    def _end(self, request):
        servers = request.servers or tuple(self.outcome)
        values = {"servers": servers, "outcome": self.outcome, "refusal": self.refusal, "ended_at": time.time()}
        return msgspec.structs.replace(request, **values)


@pytest.fixture
def controller(stores):
    """Return a function that starts a controller with the outcome of all requests."""
    started = []

    def start(outcome, refusal=""):
        started.append(Controller(stores, outcome, refusal))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stopping.set()
        one.join(20)


@pytest.mark.parametrize("kind", ["join", "leave", "sync"])
def test_a_request_returns_at_its_end(run, stores, controller, kind):
    stores.add()
    started = controller({"s1": "", "s2": ""})
    found = run(kind, "g1", "s1", "s2", "-f", "json")
    assert (found["Kind"], found["State"], found["Servers"]) == (kind, "succeeded", ["s1", "s2"])
    assert [one.kind for one in started.seen] == [RequestKind(kind)]
    (row,) = run("request", "list", "g1", "-f", "json")
    assert (row["ID"], row["State"], row["Failed"]) == (found["ID"], "succeeded", {})


def test_a_failed_request_names_the_server(run, stores, controller):
    stores.add()
    started = controller({"s1": "", "s2": "The drain failed."})
    error = run("leave", "g1", "--count", "2", "--criterion", "oldest", fails=True)
    assert "1 of 2 servers failed in request" in error
    assert "s2: The drain failed." in error
    assert (started.seen[0].count, started.seen[0].criterion) == (2, Criterion.OLDEST)
    (row,) = run("request", "list", "g1", "-f", "json")
    assert (row["State"], row["Failed"]) == ("failed", {"s2": "The drain failed."})


def test_a_refused_request_states_the_reason(run, stores, controller):
    stores.add()
    controller({}, "0 of 1 serving servers would stay.")
    assert "was refused: 0 of 1 serving servers" in run("leave", "g1", "s1", fails=True)


def test_a_request_continues_after_the_wait(run, stores):
    stores.add()
    assert "did not end in 0.1 s" in run("leave", "g1", "s1", "--wait", "0.1", fails=True)
    assert run("leave", "g1", "s1", "--wait", "0", "-f", "json")["State"] == "open"
    assert [one["State"] for one in run("request", "list", "g1", "-f", "json")] == ["open", "open"]


@pytest.mark.parametrize("words", [("leave", "g1"), ("join", "g1", "s1", "--count", "1")])
def test_servers_or_a_count_are_required(run, stores, words):
    stores.add()
    assert "servers or --count is needed" in run(*words, fails=True)


def test_tokens_are_shown_once(run, stores):
    stores.add()
    made = run("token", "create", "g1", "--name", "Aodh", "--expires", "60", "-f", "json")
    record, _ = stores.tokens.find(made["ID"])
    assert made["Token"].startswith(f"{record.id}.")
    listed = run("token", "list", "g1", "-f", "json")
    assert [(one["ID"], one["Name"]) for one in listed] == [(made["ID"], "Aodh")]
    assert made["Token"] not in json.dumps(listed)
    run("token", "delete", "g1", made["ID"])
    assert stores.tokens.find(made["ID"]) is None
    assert "has no such token" in run("token", "delete", "g1", made["ID"], fails=True)


def test_secrets_are_encrypted_with_a_new_key(run, stores, tmp_path, credential):
    stores.add()
    stores.add("g2")
    record, token = stores.tokens.create("g1", "hook", "operator")
    numbers = {"Encrypted again": 0, "Already encrypted": 3, "Unreadable": 0}
    assert run("secrets", "reencrypt", "-f", "json") == numbers
    old, new = (tmp_path / "keys").read_bytes(), Fernet.generate_key()
    (tmp_path / "keys").write_bytes(new + b"\n" + old)
    assert run("secrets", "reencrypt", "-f", "json") == numbers | {"Encrypted again": 3, "Already encrypted": 0}
    stores.groups._vault = stores.tokens._vault = Vault([new])
    assert stores.tokens.find(record.id)[1] != token
    (claim, *_) = Claims(stores.database, "one", 30).claim(2)
    (loaded,) = stores.passes.load([claim])
    assert stores.groups.open_credential(claim.group_id, loaded.credential) == credential
    (tmp_path / "keys").write_bytes(Fernet.generate_key())
    assert run("secrets", "reencrypt", "-f", "json")["Unreadable"] == 3


def test_the_schema_is_created_and_shown(tmp_path):
    path, file = tmp_path / "new.conf", tmp_path / "new.sqlite"
    path.write_text(f"[amp_cluster]\nconnection = sqlite:///{file}\n")
    status, _, err = run_amphoractl(path, "group", "database", "status")
    assert (status, "New database: amphoractl group database upgrade" in err) == (1, True)
    assert not file.exists(), "a command that reads creates nothing"
    assert run_amphoractl(path, "group", "database", "upgrade")[0] == 0
    status, out, _ = run_amphoractl(path, "group", "database", "status", "-f", "json")
    assert json.loads(out)["Fits"] is True


def test_the_commands_read_the_file_of_the_service(monkeypatch):
    monkeypatch.setenv(config.FILE_VARIABLE, "/nonexistent/cluster.conf")
    out, err = io.StringIO(), io.StringIO()
    commands = CommandManager(COMMANDS)
    commands.add_command("group list", importlib.import_module("amphora_cluster.cli.groups").ListGroups)
    assert Amphoractl(commands, stdout=out, stderr=err).run(["group", "list"]) == 1
    assert "/nonexistent/cluster.conf" in err.getvalue()
