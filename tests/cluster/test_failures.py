# SPDX-License-Identifier: Apache-2.0
"""Groups beside other members and groups, drains, outages of APIs, webhooks of strangers, crashes of controllers."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cluster_scenarios
import pytest
from cluster_scenarios import Outage
from request_stream import request

from amphora_cluster.api.signature import SignedRequest
from amphora_cluster.database.tokens import token_digest
from amphora_driver.host import namespaces
from amphora_driver.secret import Secret
from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.lasts(300)]
# Longer than the least time of a drain (service_lab.py), so that only the statistics prevent an earlier end.
OPEN_SECONDS = 25


class TestOthers:
    @pytest.mark.extended
    def test_foreign_members_are_untouched(self, served):
        cluster, web, first = served()
        cluster_scenarios.foreign_member_is_untouched(web, cluster, first)

    @pytest.mark.extended
    def test_two_groups_in_one_pool(self, served, lab):
        cluster, web, first = served()
        blue = lab.group(cluster.balancer.id, cluster.pool_id, "blue")
        cluster_scenarios.groups_share_a_pool(web, blue, cluster, first)

    def test_a_server_deleted_without_notice(self, served):
        cluster, web, first = served()
        cluster_scenarios.deleted_server_leaves(web, cluster, first)

    @pytest.mark.extended
    def test_a_server_whose_host_fails_is_unhealthy_with_a_reason(self, served):
        cluster, web, first = served()
        [second] = cluster.create()
        web.done("join", {"server": second})
        cluster.stop_host(second)
        web.reaches({first: "serving", second: "unhealthy"})
        [found] = web.shown()["unhealthy"]
        reason = "operating status ERROR" in found["reason"]
        assert (found["server_id"], reason, found["since"][-1]) == (second, True, "Z")
        # A new server that still boots can have this state, too. Its join waits for the recovery.
        status, document = web.post("join", {"server": second}, wait=2)
        assert (status, document["request"]["state"]) == (202, "open"), document
        cluster.stack.up()
        assert web.done("join", {"server": second})["succeeded"] == [second]
        web.reaches({first: "serving", second: "serving"})
        assert web.shown()["unhealthy"] == []

    @pytest.mark.extended
    def test_a_server_of_a_cell_that_does_not_answer_stays(self, served, nova):
        cluster, web, first = served()
        [second] = cluster.create()
        web.done("join", {"server": second})
        before = cluster.members()
        calls = nova.calls["servers/ID"]
        nova.down = {second}
        web.until(lambda: nova.calls["servers/ID"] > calls + 2, "the service reads the server by its id")
        assert cluster.members() == before
        nova.down = set()
        web.reaches({first: "serving", second: "serving"})
        assert cluster.members() == before


class TestDrains:
    @pytest.mark.extended
    def test_a_drain_ends_after_the_last_connection(self, cloud, served):
        """The statistics in Octavia end a drain early, but not before the open requests have ended."""
        cluster, web, _ = served(drain_seconds=100)
        [second] = cluster.create()
        web.done("join", {"server": second})
        client, listener = namespaces.path(cloud.settings.host(topology.CLIENT)), cloud.listener_of(cluster.balancer)

        def ask():
            return request(cluster.balancer.vip_address, 60, f"/slow/{OPEN_SECONDS}")

        def open_connections():
            return cloud.balancers.get_listener_statistics(listener.id).active_connections

        with ThreadPoolExecutor(2) as threads:
            begun = time.monotonic()
            asked = [threads.submit(namespaces.run_inside, client, ask) for _ in range(2)]
            cloud.until(lambda: open_connections() == 2, "the statistics show the open requests")
            web.done("leave", {"server": second})
            took = time.monotonic() - begun
            assert [one.result(5) for one in asked] == ["200", "200"]
        assert OPEN_SECONDS <= took < 60, "neither before the last answer nor after the drain time"
        assert second not in cluster.members()


class TestOutages:
    @pytest.mark.extended
    def test_nova_and_octavia_fail_for_some_time(self, served, nova, sandbox):
        cluster, web, first = served()
        stack = sandbox[0]
        of_nova = Outage(partial(setattr, nova, "fails", 503), partial(setattr, nova, "fails", None), "the stub fails")
        of_octavia = Outage(partial(stack.supervision.stop, "octavia-api"), stack.up, "Connect")
        cluster_scenarios.outages_change_no_member(web, cluster, first, of_nova, of_octavia)


class TestStrangers:
    def test_forged_and_replayed_webhooks(self, served, lab):
        cluster, web, first = served()
        other = lab.group(cluster.balancer.id, cluster.pool_id, "other")
        path, body = f"/v1/groups/{web.id}/leave", {"server": first}
        for token in ("", "x", f"{uuid.uuid4()}.forged", web.token[:-1], other.token):
            for more in ({"headers": {"Authorization": f"Bearer {token}"}}, {"query": f"?token={token}"}):
                status, found = lab.call("POST", path + more.get("query", ""), body, more.get("headers"))
                assert (status, found["happened"]) == (401, "the token is not valid for this group")
        key = token_digest(Secret(web.token.encode()))
        signed = SignedRequest(
            method="POST", path=f"/v1/groups/{web.id}/sync", query="wait=30", timestamp=int(time.time()),
            nonce=uuid.uuid4().hex, idempotency_key="", body=b"{}",
        )  # fmt: skip
        headers = signed.headers(web.token.partition(".")[0], key)
        assert lab.call("POST", signed.path + "?wait=30", {}, headers)[0] == 200
        assert lab.call("POST", signed.path + "?wait=30", {}, headers)[0] == 409
        assert lab.call("POST", path, body, headers)[0] == 401
        web.done("sync")
        assert (web.states(), set(cluster.members())) == ({first: "serving"}, {first})
        # gunicorn refuses these two requests itself, with a page of its own.
        assert lab.raw(f"GET {path}?token={web.token}&x={'y' * 5000} HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 414")
        assert lab.raw(f"GET {path}?token={web.token} in a line of five HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 400")
        web.until(lambda: "Invalid request" in lab.log("api"), "gunicorn logs a refused request")
        for name in ("api", "controller"):
            assert web.token.partition(".")[2] not in lab.log(name)

    @pytest.mark.extended
    def test_repeated_webhooks_are_idempotent(self, served):
        cluster, web, first = served()
        [second] = cluster.create()
        for _ in range(3):
            assert web.done("join", {"server": second})["succeeded"] == [second]
        for _ in range(3):
            assert web.done("leave", {"server": second})["succeeded"] == [second]
        assert set(cluster.members()) == {first}
        cluster.delete(second)
        # The caller repeats its request after the deletion of the server.
        assert web.done("leave", {"server": second})["succeeded"] == [second]


class TestCrashes:
    @pytest.mark.extended
    def test_killed_controllers_lose_no_request_of_clients_or_callers(self, served, lab):
        """SIGKILL during a join and a leave, shortly after their begin; a new controller continues."""
        cluster, web, first = served()
        with cluster.traffic() as traffic:
            [second] = cluster.create()
            for kind, present in (("join", {first, second}), ("leave", {first})) * 2:
                before = web.states().get(second)
                status, found = web.post(kind, {"server": second}, wait=0)
                assert status == 202
                web.until(lambda old=before: web.states().get(second) not in (None, old), f"the {kind} begins")
                lab.kill()
                lab.start()
                status, found = lab.call("GET", f"{found['url']}?wait=60&token={web.token}")
                assert (status, found["request"]["state"]) == (200, "succeeded"), lab.log()
                assert set(cluster.members()) == present
            traffic.more()
        assert traffic.failed == 0, traffic.answers

    @pytest.mark.extended
    def test_two_controllers_share_the_groups(self, served, lab):
        cluster, web, first = served()
        lab.start("second")
        try:
            more = cluster.create(2)
            web.done("join", {"servers": more})
            lab.kill("second")
            web.done("leave", {"servers": more})
        finally:
            lab.kill("second")
        assert set(cluster.members()) == {first}
