# SPDX-License-Identifier: Apache-2.0
"""Servers of each selector: requests, pages, shared lists, subnets, and servers that are missing in a list."""

import nova_stub
import pytest
from cluster_data import group

from amphora_cluster.cloud import session
from amphora_cluster.cloud.errors import CloudError, Missing
from amphora_cluster.cloud.nova import NovaServers
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.controller.clouds import Clouds
from amphora_cluster.model import MemberTemplate, Selector, SelectorKind


@pytest.fixture
def stub():
    with nova_stub.running() as stub:
        yield stub
    session.close_http_sessions()


@pytest.fixture
def make(stub):
    def make(heat=None, **more):
        settings = CloudSettings(without_keystone=True, endpoints={"nova": stub.url}, **more)
        return NovaServers(CloudConnection(settings, None, "sandbox"), heat)

    return make


def selected(kind, value="", servers=()):
    return Selector(kind=SelectorKind(kind), value=value, servers=servers)


def ids(servers):
    return [one.id for one in servers]


class Heat:
    def server_ids(self, value):
        return frozenset(value.split("/"))


@pytest.fixture
def fleet(stub):
    stub.add("a", "192.0.2.1", tags=["web", "blue"], metadata={"role": "web"})
    stub.add("b", "192.0.2.2", tags=["web"], metadata={"role": "db", "x": "1"})
    stub.add("c", "192.0.2.3", tags=["webs"], metadata={"role": "web"})
    stub.add("d", "192.0.2.4", project_id="other", tags=["web"], metadata={"role": "web"})
    stub.groups = {"one": ["a", "c", "d"], "empty": []}
    return stub


class TestSelectors:
    @pytest.mark.parametrize(
        ("selector", "found", "calls"),
        [
            (selected("tag", "web"), ["a", "b"], {"servers/detail": 1}),
            (selected("metadata", "role=web"), ["a", "c"], {"servers/detail": 1}),
            (selected("metadata", "role"), [], {"servers/detail": 1}),
            (selected("list", servers=("c", "d", "missing")), ["c"], {"servers/detail": 1}),
            (selected("server_group", "one"), ["a", "c"], {"servers/detail": 1, "os-server-groups/ID": 1}),
            (selected("server_group", "empty"), [], {"servers/detail": 1, "os-server-groups/ID": 1}),
            (selected("heat_stack", "a/b"), ["a", "b"], {"servers/detail": 1}),
        ],
    )
    def test_each_kind(self, make, fleet, selector, found, calls):
        assert ids(make(Heat()).servers(selector)) == found
        assert dict(fleet.calls) == calls

    def test_a_missing_server_group(self, make, fleet):
        with pytest.raises(Missing) as caught:
            make().servers(selected("server_group", "unknown"))
        assert (caught.value.final, "unknown could not be found" in caught.value.happened) == (True, True)

    def test_a_stack_without_heat(self, make, fleet):
        with pytest.raises(CloudError, match="no endpoint of Heat"):
            make().servers(selected("heat_stack", "a/b"))

    def test_the_values_of_a_server(self, make, stub):
        stub.add("a", "192.0.2.1", "2001:db8::1", name="web-1", metadata={"weight": "3"}, flavor={"vcpus": 4})
        stub.servers["a"]["created"] = "2026-01-02T03:04:05Z"
        stub.servers["a"]["addresses"]["net"].append(
            {"addr": "198.51.100.1", "version": 4, "OS-EXT-IPS:type": "floating"}
        )
        [one] = make().servers(selected("list", servers=("a",)))
        assert (one.name, one.status, one.vcpus, one.metadata) == ("web-1", "ACTIVE", 4, {"weight": "3"})
        assert one.created_at == 1767323045.0
        assert [(it.ip, it.family, it.subnet_id) for it in one.addresses] == [
            ("192.0.2.1", 4, None),
            ("2001:db8::1", 6, None),
        ]


class TestLists:
    @pytest.mark.parametrize(("asked", "most"), [(3, 1000), (1000, 3)])
    def test_pages(self, make, stub, asked, most):
        stub.most = most
        for number in range(10):
            stub.add(f"{number:02}", f"192.0.2.{number}", tags=["web"])
        wanted = [f"{number:02}" for number in range(10)]
        assert ids(make(page_size=asked).servers(selected("tag", "web"))) == wanted
        assert stub.calls["servers/detail"] == 4
        assert ids(make(page_size=asked).servers(selected("list", servers=tuple(wanted)))) == wanted

    @pytest.mark.parametrize(("deletions", "complete"), [(1, True), (3, True), (4, False)])
    def test_the_list_begins_again_if_the_last_server_of_a_page_is_deleted(self, make, stub, deletions, complete):
        for number in range(10):
            stub.add(f"{number:02}", f"192.0.2.{number}", tags=["web"])
        deleted = []

        def delete_the_last(page):
            if len(deleted) < deletions:
                deleted.append(page[-1])
                stub.servers.pop(page[-1])

        stub.after_page = delete_the_last
        if complete:
            wanted = [f"{number:02}" for number in (0, 1, *range(2 + deletions, 10))]
            assert ids(make(page_size=3).servers(selected("tag", "web"))) == wanted
        else:
            with pytest.raises(CloudError, match="marker") as caught:
                make(page_size=3).servers(selected("tag", "web"))
            assert not caught.value.final
        assert len(deleted) == deletions

    def test_groups_of_an_owner_share_a_list(self, make, fleet):
        nova = make(server_list_age=60.0)
        assert ids(nova.servers(selected("metadata", "role=web"))) == ["a", "c"]
        fleet.add("e", "192.0.2.5", metadata={"role": "web"})
        assert ids(nova.servers(selected("metadata", "role=web"))) == ["a", "c"]
        assert fleet.calls["servers/detail"] == 1
        assert ids(nova.servers(selected("metadata", "role=web"), fresh=True)) == ["a", "c", "e"]
        assert ids(nova.servers(selected("list", servers=("e",)))) == ["e"]
        assert fleet.calls["servers/detail"] == 2

    def test_a_notification_ends_the_shared_list_of_its_project_only(self, fleet):
        settings = CloudSettings(without_keystone=True, endpoints={"nova": fleet.url}, server_list_age=60.0)
        clouds = Clouds(settings)

        def shown(project):
            selector, member = selected("metadata", "role=web"), MemberTemplate(ports=(80,))
            one = group(project_id=project, selector=selector, member=member)
            return ids(clouds.get(one, None).servers(one, [], fresh=False))

        assert (shown("sandbox"), shown("other")) == (["a", "c"], ["d"])
        fleet.add("e", "192.0.2.5", metadata={"role": "web"})
        fleet.add("f", "192.0.2.6", metadata={"role": "web"}, project_id="other")
        clouds.servers_changed({"sandbox", "unknown"})
        assert (shown("sandbox"), shown("other")) == (["a", "c", "e"], ["d"])
        assert (shown("sandbox"), fleet.calls["servers/detail"]) == (["a", "c", "e"], 3)

    def test_a_failure_is_an_error_and_not_an_empty_list(self, make, fleet):
        nova = make()
        fleet.fails = 503
        for selector in (selected("tag", "web"), selected("server_group", "one"), selected("metadata", "role=web")):
            with pytest.raises(CloudError) as caught:
                nova.servers(selector)
            assert not caught.value.final
        fleet.fails = None
        assert ids(nova.servers(selected("tag", "web"))) == ["a", "b"]


class TestMissingServers:
    """A paged list of Nova leaves out the servers of a cell that does not answer."""

    @pytest.mark.parametrize(
        "selector", [selected("tag", "web"), selected("metadata", "x=1"), selected("list", servers=("a", "b"))]
    )
    def test_a_cell_that_does_not_answer(self, make, fleet, selector):
        fleet.down = {"b"}
        found = {one.id: one for one in make().servers(selector, known=["b"])}
        assert (found["b"].status, found["b"].addresses) == ("UNKNOWN", ())

    def test_a_deleted_server(self, make, fleet):
        fleet.remove("b")
        assert ids(make().servers(selected("tag", "web"), known=["a", "b"])) == ["a"]
        assert fleet.calls["servers/ID"] == 1

    @pytest.mark.parametrize(
        ("selector", "found", "reads"),
        [
            (selected("tag", "web"), {"a": True, "b": False}, 1),
            (selected("server_group", "one"), {"a": True, "b": False, "c": True}, 0),
            (selected("list", servers=("a",)), {"a": True, "b": False}, 0),
        ],
    )
    def test_a_known_server_is_not_selected_any_more(self, make, fleet, selector, found, reads):
        """Only a list by tag does not show it."""
        fleet.servers["b"]["tags"] = []
        assert {one.id: one.selected for one in make().servers(selector, known=["a", "b"])} == found
        assert fleet.calls["servers/ID"] == reads
        assert "b" not in ids(make().servers(selector))


class TestMissingSource:
    """The user deleted the server group, for example together with its servers."""

    def test_deleted_servers_leave(self, make, fleet):
        fleet.remove("a", "c")
        assert make().servers(selected("server_group", "unknown"), known=["a", "c"]) == ()
        assert fleet.calls["servers/ID"] == 2

    @pytest.mark.parametrize("known", [[], ["a", "b"]])
    def test_a_server_that_exists_is_an_error(self, make, fleet, known):
        fleet.remove("a")
        with pytest.raises(Missing):
            make().servers(selected("server_group", "unknown"), known=known)

    def test_a_wrong_endpoint_proves_no_deletion(self, make, fleet):
        fleet.url += "/wrong"
        with pytest.raises(Missing):
            make().servers(selected("server_group", "one"), known=["a", "c"])


class TestSubnets:
    def test_subnets_are_read_once_for_the_same_addresses(self, make, stub):
        stub.add("a", "192.0.2.1", subnet_id="one")
        stub.add("b", status="BUILD")
        nova = make(server_list_age=0.0)
        for _ in range(2):
            first, second = nova.servers(selected("list", servers=("a", "b")), subnets=True)
            assert ([one.subnet_id for one in first.addresses], second.addresses) == (["one"], ())
        assert stub.calls["servers/ID/os-interface"] == 1
        stub.add("a", "192.0.2.1", "192.0.2.9", subnet_id="two")
        [first, _] = nova.servers(selected("list", servers=("a", "b")), subnets=True)
        assert [one.subnet_id for one in first.addresses] == ["two", "two"]
        assert stub.calls["servers/ID/os-interface"] == 2

    def test_an_address_that_neutron_does_not_show_yet_is_read_again(self, make, stub):
        stub.add("a", "192.0.2.1", subnet_id="one")
        nova, answer = make(server_list_age=0.0), stub.answer

        def without(path, *rest):
            status, document = answer(path, *rest)
            return status, {"interfaceAttachments": []} if path.endswith("os-interface") else document

        stub.answer = without
        [one] = nova.servers(selected("list", servers=("a",)), subnets=True)
        assert [it.subnet_id for it in one.addresses] == [None]
        stub.answer = answer
        [one] = nova.servers(selected("list", servers=("a",)), subnets=True)
        assert [it.subnet_id for it in one.addresses] == ["one"]
