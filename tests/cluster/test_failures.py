# SPDX-License-Identifier: Apache-2.0
"""Groups beside other members and other groups, outages of the APIs, webhooks of strangers, crashes of controllers."""

import time
import uuid

import client_traffic
import pytest

from amphora_cluster.api.signature import SignedRequest
from amphora_cluster.database.tokens import token_digest
from amphora_driver.secret import Secret

pytestmark = [pytest.mark.root, pytest.mark.lasts(300)]


def members(cloud, group):
    """The members of the pool by name: what a user sees."""
    names = ("id", "address", "weight", "tags", "is_admin_state_up", "backup", "monitor_port")
    return {one.name: {name: getattr(one, name) for name in names} for one in cloud.balancers.members(group.pool_id)}


class TestOthers:
    @pytest.mark.extended
    def test_foreign_members_are_untouched(self, cloud, served, cluster):
        balancer, web, first = served(others=("member2",))
        before = members(cloud, web.group)["member2"]
        # A user changes the member while the group works; the group never changes it back.
        cloud.balancers.update_member(before["id"], web.group.pool_id, weight=7, tags=["mine"])
        cloud.active(balancer.id)
        wanted = members(cloud, web.group)["member2"]
        [third] = cluster.create("member3")
        web.done("join", {"server": third})
        # The server behind the foreign member joins by mistake. It fails with the reason, and the others continue.
        [second] = cluster.create("member2")
        status, refused = web.post("join", {"servers": [second, third]})
        assert (status, set(refused["failed"]), refused["request"]["succeeded"]) == (409, {second}, [third])
        assert before["id"] in refused["failed"][second]
        web.done("leave", {"servers": [first, third]})
        # A leave of the server of the foreign member is refused: it still receives requests.
        status, refused = web.post("leave", {"server": second})
        assert (status, "still receives requests" in refused["failed"][second]) == (409, True)
        web.deleted()
        assert members(cloud, web.group) == {"member2": wanted}

    @pytest.mark.extended
    def test_two_groups_in_one_pool(self, cloud, served, cluster, lab):
        balancer, web, first = served()
        blue = lab.group(balancer, cloud.pool_of(balancer), "blue")
        [second] = cluster.create("member2", tag="blue")
        blue.done("join", {"server": second})
        with client_traffic.Traffic(cloud, balancer.vip_address) as traffic:
            both = members(cloud, web.group)
            tags = {name: one["tags"] for name, one in both.items()}
            assert tags == {first: [web.group.tag], second: [blue.group.tag]}
            blue.done("join", {"servers": cluster.create("member3", tag="blue")})
            web.done("leave", {"server": first})
            assert members(cloud, web.group)[second] == both[second]
            web.done("join", {"server": first})
            blue.deleted()
            traffic.more()
            assert set(members(cloud, web.group)) == {first}
        assert traffic.failed == 0, traffic.answers

    def test_a_server_deleted_without_notice(self, cloud, served, cluster):
        _, web, first = served()
        [second] = cluster.create("member2")
        web.done("join", {"server": second})
        cluster.delete(second)
        web.reaches({first: "serving"})
        web.until(lambda: set(members(cloud, web.group)) == {first}, "the member is removed")

    @pytest.mark.extended
    def test_a_server_whose_host_fails_is_unhealthy_with_a_reason(self, cloud, served, cluster):
        _, web, first = served()
        [second] = cluster.create("member2")
        web.done("join", {"server": second})
        cluster.stack.supervision.stop("member2")
        web.reaches({first: "serving", second: "unhealthy"})
        [found] = web.shown()["unhealthy"]
        reason = "operating status ERROR" in found["reason"]
        assert (found["server_id"], reason, found["since"][-1]) == (second, True, "Z")
        cluster.stack.up()
        web.reaches({first: "serving", second: "serving"})
        assert web.shown()["unhealthy"] == []

    @pytest.mark.extended
    def test_a_server_of_a_cell_that_does_not_answer_stays(self, cloud, served, cluster, nova):
        _, web, first = served()
        [second] = cluster.create("member2")
        web.done("join", {"server": second})
        before = members(cloud, web.group)
        calls = nova.calls["servers/ID"]
        nova.down = {second}
        web.until(lambda: nova.calls["servers/ID"] > calls + 2, "the service reads the server by its id")
        assert members(cloud, web.group) == before
        nova.down = set()
        web.reaches({first: "serving", second: "serving"})
        assert members(cloud, web.group) == before


class TestOutages:
    @pytest.mark.extended
    def test_nova_and_octavia_fail_for_some_time(self, cloud, served, cluster, nova, sandbox):
        balancer, web, first = served()
        [second] = cluster.create("member2")
        web.done("join", {"server": second})
        before = members(cloud, web.group)
        with client_traffic.Traffic(cloud, balancer.vip_address) as traffic:
            nova.fails = 503
            web.until(lambda: web.shown()["error"], "the error is recorded")
            assert "the stub fails" in web.shown()["error"]
            assert members(cloud, web.group) == before
            status, _ = web.post("leave", {"server": second}, wait=1)
            assert status == 202
            sandbox[0].supervision.stop("octavia-api")
            nova.fails = None
            web.until(lambda: "Connect" in (web.shown()["error"] or ""), "the outage of Octavia is recorded")
            sandbox[0].up()
            web.reaches({first: "serving", second: "left"})
            assert web.shown()["error"] is None
            traffic.more()
        assert set(members(cloud, web.group)) == {first}
        assert traffic.failed == 0, traffic.answers


class TestStrangers:
    def test_forged_and_replayed_webhooks(self, cloud, served, lab):
        balancer, web, first = served()
        other = lab.group(balancer, cloud.pool_of(balancer), "other")
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
        assert (web.states(), set(members(cloud, web.group))) == ({first: "serving"}, {first})
        # gunicorn refuses these two requests itself, with a page of its own.
        assert lab.raw(f"GET {path}?token={web.token}&x={'y' * 5000} HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 414")
        assert lab.raw(f"GET {path}?token={web.token} in a line of five HTTP/1.1\r\n\r\n").startswith("HTTP/1.1 400")
        web.until(lambda: "Invalid request" in lab.log("api"), "gunicorn logs a refused request")
        for name in ("api", "controller"):
            assert web.token.partition(".")[2] not in lab.log(name)

    @pytest.mark.extended
    def test_repeated_webhooks_are_idempotent(self, cloud, served, cluster):
        _, web, first = served()
        [second] = cluster.create("member2")
        for _ in range(3):
            assert web.done("join", {"server": second})["succeeded"] == [second]
        for _ in range(3):
            assert web.done("leave", {"server": second})["succeeded"] == [second]
        assert set(members(cloud, web.group)) == {first}
        cluster.delete(second)
        # The caller repeats its request after the deletion of the server.
        assert web.done("leave", {"server": second})["succeeded"] == [second]


class TestCrashes:
    @pytest.mark.extended
    def test_killed_controllers_lose_no_request_of_clients_or_callers(self, cloud, served, cluster, lab):
        """SIGKILL during a join and a leave, shortly after their begin; a new controller continues."""
        balancer, web, first = served()
        with client_traffic.Traffic(cloud, balancer.vip_address) as traffic:
            [second] = cluster.create("member2")
            for kind, present in (("join", {first, second}), ("leave", {first})) * 2:
                before = web.states().get(second)
                status, found = web.post(kind, {"server": second}, wait=0)
                assert status == 202
                web.until(lambda old=before: web.states().get(second) not in (None, old), f"the {kind} begins")
                lab.kill()
                lab.start()
                status, found = lab.call("GET", f"{found['url']}?wait=60&token={web.token}")
                assert (status, found["request"]["state"]) == (200, "succeeded"), lab.log()
                assert set(members(cloud, web.group)) == present
            traffic.more()
        assert traffic.failed == 0, traffic.answers

    @pytest.mark.extended
    def test_two_controllers_share_the_groups(self, cloud, served, cluster, lab):
        _, web, first = served()
        lab.start("second")
        try:
            more = cluster.create("member2", "member3")
            web.done("join", {"servers": more})
            lab.kill("second")
            web.done("leave", {"servers": more})
        finally:
            lab.kill("second")
        assert set(members(cloud, web.group)) == {first}
