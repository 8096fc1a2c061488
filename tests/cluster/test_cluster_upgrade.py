# SPDX-License-Identifier: Apache-2.0
"""Cluster membership of the last release is upgraded under load, in the order of docs/how-to/upgrade.md.

The new version is this one with an expand migration and a contract migration. A caller lets a server leave and join
without a pause, and clients send requests, while controllers and APIs of two versions work side by side.
"""

import http.client
import signal
import threading
import time
import uuid
from itertools import cycle

import mariadb
import previous
import pytest
import service_lab
import sqlalchemy as sa
from cluster_deployment import GroupCaller

from amphora_cluster.api.signature import SignedRequest
from amphora_cluster.database.tokens import token_digest
from amphora_driver.secret import Secret
from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.extended, pytest.mark.lasts(600)]

UPGRADE = ("group", "database", "upgrade")


class Versions:
    """The folders of the old and the new version, and the revisions of their schemas."""

    def __init__(self, folder):
        self.old, self.new = folder / "old", folder / "new"
        for one in (self.old, self.new):
            one.mkdir()
        self.release = previous.release(self.old, previous.CLUSTER)
        self.expand, self.contract = previous.next_schema(self.new, previous.CLUSTER)


@pytest.fixture
def versions(tmp_path):
    return Versions(tmp_path)


@pytest.fixture
def lab(versions, settings, nova, cloud, tmp_path):
    """Controller, API and tables of the release. MariaDB has the tables, because SQLite has no locks of tables."""
    with mariadb.server("cluster") as (url,):
        (tmp_path / "lab").mkdir()
        # With one thread, a controller works on one group at a time, so two groups need both controllers.
        made = service_lab.Lab(tmp_path / "lab", settings, nova, url, threads=1)
        made.engine = sa.create_engine(url)
        try:
            status, said = made.amphoractl(*UPGRADE, version=versions.old)
            assert (status, said["After"]) == (0, versions.release), said
            made.start("old", versions.old)
            made.start("api", versions.old)
            yield made
        finally:
            made.stop()
            made.engine.dispose()
            nova.servers.clear()


class Changes:
    """A caller that lets a server leave and join in turn, each time after the end of the previous request.

    Attributes:
        apis: the APIs that receive the requests in turn.
        done: number of requests that have succeeded.
        repeated: number of requests that were sent again without an answer.
        answers: number of requests by API.
        kind: kind of the last request that has succeeded.
    """

    def __init__(self, cloud, group, server):
        self._cloud, self._group, self._server = cloud, group, server
        self.apis, self.done, self.repeated, self.answers, self.kind = ["api"], 0, 0, {}, "join"
        self._errors = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        assert self._errors == []

    def more(self, number=2):
        """Wait until the present request, and this number of further ones, have succeeded."""
        wanted = self.done + number + 1
        self._cloud.until(lambda: self._errors or self.done >= wanted, f"{number} more requests have ended", 90)
        assert self._errors == []

    def _run(self):
        try:
            for number, kind in enumerate(cycle(("leave", "join"))):
                if self._stopping.is_set():
                    return
                self._send(kind, f"{kind}-{number}", number)
        except BaseException as error:  # noqa: BLE001 - the test reads it
            self._errors.append(error)

    def _send(self, kind, key, number):
        deadline = time.monotonic() + 60
        while True:
            api = self.apis[number % len(self.apis)]
            try:
                status, document = self._group.post(kind, {"server": self._server}, key=key, api=api)
            except (OSError, http.client.HTTPException):
                # The key makes this the same request, if it was recorded before its API was stopped.
                assert time.monotonic() < deadline, f"{api} does not answer"
                self.repeated += 1
                time.sleep(0.1)
                continue
            assert (status, document["request"]["succeeded"]) == (200, [self._server]), document
            self.answers[api] = self.answers.get(api, 0) + 1
            self.done, self.kind = self.done + 1, kind
            return


def create_group(lab, versions, cloud, balancer, name):
    """Create a group and a token by the commands of the release."""
    words = ("--tag", name, "--load-balancer", balancer.id, "--pool", cloud.pool_of(balancer).id, "--port", "8080")
    words += ("--subnet", topology.MEMBER_SUBNET, "--project", service_lab.PROJECT, "--drain-seconds", "1")
    status, made = lab.amphoractl("group", "create", name, *words, version=versions.old)
    assert status == 0, made
    status, token = lab.amphoractl("group", "token", "create", name, version=versions.old)
    assert status == 0, token
    return GroupCaller(lab, made["ID"], token["Token"])


def owners(lab):
    """Return the controllers that work on a group. The schema of the tables is of any version."""
    with lab.engine.connect() as connection:
        return set(connection.scalars(sa.text("SELECT owner FROM cluster_group WHERE owner IS NOT NULL")))


def registered(lab, revision):
    """Return the controllers that know a migration."""
    with lab.engine.connect() as connection:
        query = sa.text("SELECT name FROM cluster_process WHERE revision = :revision")
        return set(connection.scalars(query, {"revision": revision}))


def state_of(group, server):
    (node,) = [one for one in group.shown()["nodes"] if one["server_id"] == server]
    return node["state"]


def test_a_release_is_upgraded_under_load(lab, versions, cloud, make_cluster, record_property):
    begun = time.monotonic()
    balancer = cloud.served("upgrade", ())
    cluster = make_cluster(balancer)
    web, _ = (create_group(lab, versions, cloud, balancer, name) for name in ("web", "other"))
    first, second = cluster.create(2)
    web.done("join", {"servers": [first, second]})
    with cluster.traffic() as traffic, Changes(cloud, web, second) as changes:
        expand(lab, versions, cloud, changes)
        replace_the_controller(lab, versions, cloud, changes, lambda: state_of(web, second) == "draining")
        run_both(lab, versions, cloud, cluster.nova, changes)
        use_both_apis(lab, web)
        contract(lab, versions, changes, web)
        traffic.more()
    record_property("release", previous.release_before())
    record_property("seconds", round(time.monotonic() - begun, 1))
    record_property("requests", changes.done)
    record_property("answers", dict(changes.answers))
    record_property("repeated", changes.repeated)
    record_property("traffic", dict(traffic.answers))
    assert traffic.failed == 0, traffic.answers
    assert min(changes.answers["api"], changes.answers["api-new"]) >= 1
    serving = {first, second} if changes.kind == "join" else {first}
    assert set(cluster.members()) == serving


def expand(lab, versions, cloud, changes):
    """Expand the schema. The processes of the release work on it."""
    changes.more(0)
    status, said = lab.amphoractl(*UPGRADE, version=versions.new)
    assert (status, said["After"], said["Contract migrations"]) == (0, versions.expand, versions.contract), said
    assert said["Before"] == versions.release
    newer = f"works with the schema {versions.expand}, newer than {versions.release} of this version"
    for name in ("old", "api"):
        cloud.until(lambda one=name: newer in lab.log(one), f"{name} has checked the schema")
    changes.more(1)


def replace_the_controller(lab, versions, cloud, changes, drains):
    """Kill the controller during a leave. The other version continues; afterwards the release does so."""
    present = "old"
    for name, folder in (("new", versions.new), ("old", versions.old)):
        cloud.until(drains, "the server drains")
        lab.kill(present)
        lab.start(name, folder)
        changes.more(1)
        present = name


def run_both(lab, versions, cloud, nova, changes):
    """Run controllers and APIs of both versions. A contract migration is refused."""
    with nova.lock:
        (ours,) = cloud.until(lambda: owners(lab), "the controller works on a group")
    lab.start("new", versions.new)
    lab.start("api-new", versions.new)
    changes.apis.append("api-new")
    with nova.lock:
        cloud.until(lambda: len(owners(lab)) == 2, "each controller works on a group")
        (theirs,) = owners(lab) - {ours}
        cloud.until(lambda: theirs in registered(lab, versions.contract), "the new controller has sent a heartbeat")
        status, said = lab.amphoractl(*UPGRADE, "--contract", version=versions.new)
        assert (status, ours in said, theirs in said) == (1, True, False), said
    changes.more()


def use_both_apis(lab, web):
    """Each API knows the keys and the nonces that the other one has recorded."""
    apis = ("api", "api-new")
    answers = [web.post("sync", {}, key="sent-twice", wait=0, api=one)[1]["request"]["id"] for one in apis]
    assert len(set(answers)) == 1
    signed = SignedRequest(
        method="POST", path=f"/v1/groups/{web.id}/sync", query="", timestamp=int(time.time()),
        nonce=uuid.uuid4().hex, idempotency_key="", body=b"{}",
    )  # fmt: skip
    headers = signed.headers(web.token.partition(".")[0], token_digest(Secret(web.token.encode())))
    statuses = [lab.call("POST", signed.path, {}, headers, api=one)[0] for one in reversed(apis)]
    assert statuses[0] in (200, 202)
    assert statuses[1] == 409, "the nonce was used at the other API"


def contract(lab, versions, changes, web):
    """Contract the schema. A forgotten API of the release refuses requests, and its controller does not start."""
    lab.kill("old", signal.SIGTERM)
    changes.apis.remove("api")
    status, said = lab.amphoractl(*UPGRADE, "--contract", version=versions.new)
    assert (status, said) == (0, {"Before": versions.expand, "After": versions.contract, "Contract migrations": ""})
    changes.more(1)
    reason = f"the contract migration {versions.contract} has changed the schema"
    assert lab.call("GET", "/healthcheck", api="api")[0] == 503
    assert web.post("sync", {}, api="api")[0] == 503
    assert reason in lab.log("api")
    lab.start("old", versions.old)
    assert (lab.ended("old"), reason in lab.log("old")) == (1, True), lab.log("old")
