# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova` with a real Nova, Glance, Placement, Neutron and Keystone: each call of the interface."""

import time
import uuid

import msgspec
import pytest
from free_ports import free_ports
from nova_boots import new_id, partner, ports_of, request, running, settled, tagged, until
from whole_cloud import FLAVOR, ZONES

from amphora_driver.compute.interface import Location, MachineState, Placement
from amphora_driver.errors import ComputeError
from amphora_driver.openstack.errors import TimedOut

pytestmark = [pytest.mark.extended, pytest.mark.lasts(600)]
pytest_plugins = ("nova_fixtures",)


class TestBoot:
    def test_a_server_has_port_address_drive_tags_and_no_other_object(
        self, nova, nova_admin, deployment, management, image, nova_cloud
    ):
        wanted = request()
        made = nova.boot(wanted)
        assert (made.state, made.image) == (MachineState.BUILDING, image)
        found = settled(nova, wanted.amphora_id)
        host = nova_admin.compute.get_server(made.compute_id).compute_host
        assert found == msgspec.structs.replace(
            made, state=MachineState.RUNNING, location=Location(host=found.location.host, zone=ZONES[host])
        )
        assert found.location.host in nova.host_names(host)
        assert found.location.host not in nova.host_names("another")
        [server] = tagged(nova_admin, deployment)
        assert (server.id, server.name, str(server.has_config_drive)) == (
            made.compute_id,
            f"octavia-amphora-{wanted.amphora_id}",
            "True",
        )
        assert set(server.tags) == {f"amphora-deployment:{deployment}", f"amphora:{wanted.amphora_id}"}
        [port] = ports_of(nova_admin, wanted.amphora_id)
        assert (port.device_id, port.network_id, port.status) == (server.id, management.id, "ACTIVE")
        families = {":" in one["ip_address"]: one["ip_address"] for one in port.fixed_ips}
        assert (set(families), made.management_address) == ({True, False}, families[False])
        assert (nova.machines(), nova.locations()) == (
            {wanted.amphora_id},
            {wanted.amphora_id: found.location},
        )
        # The reader of the image has written the boot files from Nova's own config drive.
        settings = nova_cloud.folder / "guests"
        written = until(lambda: list(settings.glob("**/amphora-agent/agent.conf")), "the boot files are written")
        assert f"bind_address = {made.management_address}\n" in {
            one.read_text().split("[agent]\n")[1] for one in written
        }

    def test_a_repeated_boot_returns_the_same_server(self, make_nova, nova, nova_admin, deployment):
        wanted = request()
        made = nova.boot(wanted)
        assert make_nova(deployment).boot(wanted).compute_id == made.compute_id
        settled(nova, wanted.amphora_id)
        assert nova.boot(wanted).compute_id == made.compute_id
        assert len(tagged(nova_admin, deployment)) == len(ports_of(nova_admin, wanted.amphora_id)) == 1

    def test_a_boot_without_an_answer_is_found_by_the_next_one(self, nova, make_nova, nova_admin, deployment):
        send = nova._nova._service.request

        def lose(method, path, **more):
            answer = send(method, path, **more)
            if method == "POST":
                raise TimedOut(f"{method} {path}", "ReadTimeout")
            return answer

        nova._nova._service.request = lose
        wanted = request()
        with pytest.raises(ComputeError, match="ReadTimeout") as caught:
            nova.boot(wanted)
        assert not caught.value.final
        [server] = tagged(nova_admin, deployment)
        assert make_nova(deployment).boot(wanted).compute_id == server.id

    def test_a_second_server_is_deleted(self, nova, nova_admin, deployment):
        wanted = request()
        kept = running(nova, wanted)
        server = nova_admin.compute.get_server(kept.compute_id)
        tags = [f"amphora-deployment:{deployment}", f"amphora:{wanted.amphora_id}"]
        body = {
            "name": server.name, "flavorRef": nova_admin.compute.find_flavor(FLAVOR).id, "imageRef": kept.image,
            "networks": "none", "tags": tags,
        }  # fmt: skip
        answer = nova_admin.compute.post("/servers", json={"server": body}, microversion="2.67")
        second = answer.json()["server"]["id"]
        assert len(tagged(nova_admin, deployment)) == 2
        # On a busy machine, Nova once needed more than two minutes to delete a server that it still built.
        until(lambda: nova_admin.compute.get_server(second).status != "BUILD", f"{second} is built")
        assert nova.boot(wanted).compute_id == kept.compute_id
        until(lambda: [one.id for one in tagged(nova_admin, deployment)] == [kept.compute_id], f"{second} is deleted")
        assert ports_of(nova_admin, wanted.amphora_id)[0].device_id == kept.compute_id

    def test_two_management_networks(self, make_nova, deployment, nova_admin, management):
        network = nova_admin.network.create_network(name="second")
        nova_admin.network.create_subnet(network_id=network.id, ip_version=6, cidr="2001:db8:115::/64", gateway_ip=None)
        nova = make_nova(deployment)
        wanted = request(management_networks=(network.id, management.id))
        found = running(nova, wanted)
        assert found.management_address.startswith("2001:db8:115:")
        assert {one.network_id for one in ports_of(nova_admin, wanted.amphora_id)} == {network.id, management.id}
        nova.destroy(wanted.amphora_id)
        assert ports_of(nova_admin, wanted.amphora_id) == []


class TestFailures:
    @pytest.fixture
    def large(self, nova_admin):
        """A flavor that no hypervisor can run."""
        made = nova_admin.compute.create_flavor(name=new_id(), ram=64, vcpus=1, disk=10**5)
        yield made.name
        nova_admin.compute.delete_flavor(made)

    def test_no_valid_host_is_the_reason_and_the_next_boot_replaces_it(self, nova, nova_admin, deployment, large):
        wanted = request(flavor=large)
        first = nova.boot(wanted).compute_id
        found = settled(nova, wanted.amphora_id)
        assert (found.state, found.location.host) == (MachineState.FAILED, None)
        assert "No valid host was found" in found.reason
        again = msgspec.structs.replace(wanted, flavor=FLAVOR)
        assert running(nova, again).compute_id != first
        assert len(tagged(nova_admin, deployment)) == len(ports_of(nova_admin, wanted.amphora_id)) == 1

    def test_a_failed_server_is_destroyed(self, nova, nova_admin, deployment, large):
        wanted = request(flavor=large)
        nova.boot(wanted)
        settled(nova, wanted.amphora_id)
        nova.destroy(wanted.amphora_id)
        assert (tagged(nova_admin, deployment), ports_of(nova_admin, wanted.amphora_id)) == ([], [])

    def test_a_used_up_quota_is_final_and_leaves_nothing(self, nova_cloud, nova, nova_admin, deployment):
        project = nova_cloud.projects["service"]
        operator = nova_cloud.connect("admin", "admin").compute
        before = operator.get_quota_set(project).instances
        # Without `force`, Nova refuses a quota below the number of servers. Servers of other tests may exist.
        operator.update_quota_set(project, instances=0, force=True)
        wanted = request()
        try:
            with pytest.raises(ComputeError, match="a quota is used up: Quota exceeded for instances") as caught:
                nova.boot(wanted)
        finally:
            operator.update_quota_set(project, instances=before)
        assert caught.value.final
        nova.destroy(wanted.amphora_id)
        assert (tagged(nova_admin, deployment), ports_of(nova_admin, wanted.amphora_id)) == ([], [])

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"flavor": "missing"}, "'missing': it does not exist"),
            ({"image_tag": "missing"}, "no active image with the tag 'missing'"),
            ({"zones": ("missing",)}, "requested availability zone is not available"),
            ({"management_networks": (str(uuid.UUID(int=0)),)}, "could not be found|does not exist"),
        ],
    )
    def test_a_missing_object_is_final(self, nova, nova_admin, deployment, values, named):
        wanted = request(**values)
        with pytest.raises(ComputeError, match=named) as caught:
            nova.boot(wanted)
        assert caught.value.final
        nova.destroy(wanted.amphora_id)
        assert (tagged(nova_admin, deployment), ports_of(nova_admin, wanted.amphora_id)) == ([], [])

    def test_a_missing_right(self, nova_cloud, make_nova, deployment):
        # The user `demo` may not use the ports of the service project's network.
        nova = make_nova(deployment, openstack=nova_cloud.auth("demo", "demo"))
        with pytest.raises(ComputeError):
            nova.boot(request(image_tag="missing"))

    def test_a_nova_that_does_not_answer(self, make_nova, deployment):
        url = f"http://127.0.0.1:{free_ports(1)[0]}/v2.1"
        nova = make_nova(deployment, openstack={"compute_endpoint_override": url})
        for call in (lambda: nova.get(new_id()), lambda: nova.destroy(new_id()), lambda: nova.boot(request())):
            with pytest.raises(ComputeError) as caught:
                call()
            assert not caught.value.final
        nova._nova._service._adapter = None


class TestPlacement:
    def test_a_pair_spans_two_zones(self, make_nova, deployment):
        nova = make_nova(deployment, zones=",".join(ZONES.values()))
        first = request()
        one = running(nova, first)
        second = request(load_balancer_id=first.load_balancer_id, partners=(partner(first, one),))
        assert {one.location.zone, running(nova, second).location.zone} == set(ZONES.values())

    def test_a_zone_that_nova_does_not_know_is_skipped(self, make_nova, deployment):
        zone = next(iter(ZONES.values()))
        nova = make_nova(deployment)
        assert running(nova, request(zones=("missing", zone))).location.zone == zone

    def test_a_server_group_keeps_amphorae_apart(self, make_nova, deployment, nova_admin):
        nova = make_nova(deployment, server_groups=True)
        first = request(placement=Placement.REQUIRED)
        one = running(nova, first)
        more = {"load_balancer_id": first.load_balancer_id, "placement": Placement.REQUIRED}
        second = request(partners=(partner(first, one),), **more)
        two = running(nova, second)
        assert one.location.host != two.location.host
        groups = [group for group in nova_admin.compute.server_groups() if first.load_balancer_id in group.name]
        assert [set(group.member_ids) for group in groups] == [{one.compute_id, two.compute_id}]
        third = request(partners=(partner(first, one), partner(second, two)), **more)
        nova.boot(third)
        found = settled(nova, third.amphora_id)
        assert (found.state, "No valid host" in found.reason) == (MachineState.FAILED, True)
        for wanted in (first, second, third):
            nova.destroy(wanted.amphora_id)
        for _ in range(2):
            nova.release_load_balancer(first.load_balancer_id)
        assert [group for group in nova_admin.compute.server_groups() if first.load_balancer_id in group.name] == []

    def test_a_deletion_between_two_pages_hides_no_server_group(self, make_nova, deployment, monkeypatch):
        client = make_nova(deployment, page_size=2)._nova
        name = new_id()
        first, *others = (client.create_server_group(name, "anti-affinity")["id"] for _ in range(5))
        send, pages = client._send, []

        def delete_after_the_first_page(method, path, **more):
            answer = send(method, path, **more)
            if (method, path) == ("GET", "/os-server-groups"):
                pages.append(answer)
                if len(pages) == 1:
                    client.delete_server_group(first)
            return answer

        monkeypatch.setattr(client, "_send", delete_after_the_first_page)
        assert set(others) <= {one["id"] for one in client.server_groups(name)}
        assert len(pages) > 2
        for one in others:
            assert client.delete_server_group(one)


class TestImages:
    def test_the_newest_image_of_the_owner_only(self, nova_cloud, nova, make_nova, deployment, make_image):
        tag = new_id()
        assert nova.image(tag) is None
        first = make_image(tag)
        # Creation times are whole seconds.
        time.sleep(1.1)
        second = make_image(tag)
        time.sleep(1.1)
        stranger = nova_cloud.connect("demo", "demo")
        foreign = make_image(tag, stranger)
        stranger.image.update_image(foreign, visibility="community")
        assert make_nova(deployment).image(tag) == second != first
        assert running(nova, request(image_tag=tag)).image == second

    def test_an_image_that_is_not_active_is_not_used(self, nova_admin, nova):
        tag = new_id()
        queued = nova_admin.image.post(
            "/images", json={"name": tag, "tags": [tag], "disk_format": "raw", "container_format": "bare"}
        ).json()
        assert nova.image(tag) is None
        nova_admin.image.delete_image(queued["id"])
