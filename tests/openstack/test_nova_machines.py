# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova` with a real Nova, Glance, Placement, Neutron and Keystone: interfaces, removal, checks."""

from contextlib import suppress

import pytest
from nova_boots import Requests, new_id, ports_of, request, running, settled, tagged, until
from openstack.exceptions import HttpException, NotFoundException
from whole_cloud import FLAVOR, ZONES

from amphora_driver.errors import ComputeError, UnsupportedOption
from amphora_driver.network.interface import PortPurpose, PortRequest

pytestmark = [pytest.mark.extended, pytest.mark.lasts(600)]
pytest_plugins = ("nova_fixtures",)


class TestInterfaces:
    @pytest.fixture
    def vip_port(self, nova, front):
        def make(amphora_id):
            return nova._network.ensure_port(
                PortRequest(
                    amphora_id=amphora_id,
                    network_id=front.network_id,
                    subnet_ids=(front.id,),
                    purpose=PortPurpose.VIP,
                    load_balancer_id=new_id(),
                    project_id="",
                    vips=("198.51.101.200",),
                )
            )

        made = []
        yield lambda amphora_id: made.append(make(amphora_id)) or made[-1]
        for one in made:
            nova._network.delete_port(one.id)

    def test_attach_and_detach_can_be_repeated(self, nova, nova_admin, vip_port):
        wanted = request()
        machine = running(nova, wanted)
        port = vip_port(wanted.amphora_id)
        for _ in range(2):
            nova.attach(wanted.amphora_id, port)
            found = nova_admin.network.get_port(port.id)
            assert (found.device_id, found.status) == (machine.compute_id, "ACTIVE")
        assert [one["ip_address"] for one in found.allowed_address_pairs] == ["198.51.101.200"]
        for _ in range(2):
            nova.detach(wanted.amphora_id, port)
            assert nova_admin.network.get_port(port.id).device_id == ""
        nova.attach(wanted.amphora_id, port)
        nova.destroy(wanted.amphora_id)
        # The port is not a management port: the network backend deletes it.
        assert nova_admin.network.get_port(port.id).device_id == ""
        nova.detach(wanted.amphora_id, port)

    def test_a_port_of_another_server_is_an_error(self, nova, nova_admin, vip_port):
        first, second = request(), request()
        for wanted in (first, second):
            nova.boot(wanted)
        one = settled(nova, first.amphora_id)
        settled(nova, second.amphora_id)
        port = vip_port(first.amphora_id)
        nova.attach(first.amphora_id, port)
        with pytest.raises(ComputeError, match="in use"):
            nova.attach(second.amphora_id, port)
        nova.detach(second.amphora_id, port)
        assert nova_admin.network.get_port(port.id).device_id == one.compute_id

    def test_a_server_that_does_not_run_is_an_error_with_its_state(self, nova, nova_admin, vip_port):
        wanted = request()
        machine = running(nova, wanted)
        nova_admin.compute.stop_server(machine.compute_id)
        until(lambda: nova_admin.compute.get_server(machine.compute_id).status == "SHUTOFF", "the server is stopped")
        with pytest.raises(ComputeError, match="status SHUTOFF"):
            nova.attach(wanted.amphora_id, vip_port(wanted.amphora_id))
        with pytest.raises(ComputeError, match="does not exist"):
            nova.attach(new_id(), vip_port(new_id()))


class TestRemoval:
    def test_it_can_be_repeated_and_ends_after_nova(self, nova, nova_admin, deployment):
        wanted = request()
        machine = running(nova, wanted)
        for _ in range(2):
            nova.destroy(wanted.amphora_id)
            assert (nova.get(wanted.amphora_id), nova.machines(), nova.locations()) == (None, frozenset(), {})
        with pytest.raises(NotFoundException):
            nova_admin.compute.get_server(machine.compute_id)
        assert ports_of(nova_admin, wanted.amphora_id) == []

    def test_a_server_that_builds_is_removed(self, nova, nova_admin, deployment):
        wanted = request()
        nova.boot(wanted)
        nova.destroy(wanted.amphora_id)
        assert (tagged(nova_admin, deployment), ports_of(nova_admin, wanted.amphora_id)) == ([], [])

    def test_a_slow_removal_is_an_error_until_nova_has_finished(self, nova_cloud, make_nova, deployment, nova_admin):
        nova = make_nova(deployment, deletion_timeout=1)
        wanted = request()
        machine = running(nova, wanted)
        host = nova_admin.compute.get_server(machine.compute_id).compute_host
        nova_cloud.kill(host)
        try:
            with pytest.raises(ComputeError, match="still being deleted") as caught:
                nova.destroy(wanted.amphora_id)
            assert not caught.value.final
            assert len(ports_of(nova_admin, wanted.amphora_id)) == 1
        finally:
            nova_cloud.serve(host)

        def gone():
            with suppress(ComputeError):
                nova.destroy(wanted.amphora_id)
                return True
            return False

        until(gone, "the server is removed after the restart of its host")
        assert ports_of(nova_admin, wanted.amphora_id) == []

    def test_foreign_servers_are_not_touched(self, nova, make_nova, nova_admin, deployment, image):
        amphora_id = new_id()
        flavor = nova_admin.compute.find_flavor(FLAVOR).id

        def foreign(name, *tags):
            body = {"name": name, "flavorRef": flavor, "imageRef": image, "networks": "none", "tags": tags}
            answer = nova_admin.compute.post("/servers", json={"server": body}, microversion="2.67")
            return answer.json()["server"]["id"]

        # A server of Octavia's own provider, one with a tag only, and one of another deployment.
        others = {
            foreign(f"amphora-{amphora_id}"),
            foreign(f"octavia-amphora-{new_id()}", f"amphora-deployment:{deployment}"),
            foreign(f"octavia-amphora-{amphora_id}", f"amphora:{amphora_id}"),
            foreign(f"octavia-amphora-{amphora_id}", f"amphora:{amphora_id}", f"amphora-deployment:{deployment}2"),
        }
        try:
            assert nova.get(amphora_id) is None
            made = running(nova, request(amphora_id=amphora_id))
            assert made.compute_id not in others
            for one in {amphora_id, *nova.machines()}:
                nova.destroy(one)
            assert nova.locations() == {}
            for one in others:
                assert nova_admin.compute.get_server(one).task_state != "deleting"
        finally:
            for one in others:
                nova_admin.compute.delete_server(one)

    def test_a_user_cannot_forge_the_tags(self, nova, nova_cloud, deployment, make_image):
        """Nova lists the servers of the project of the service account only."""
        amphora_id, user = new_id(), nova_cloud.connect("demo", "demo")
        body = {
            "name": f"octavia-amphora-{amphora_id}",
            "flavorRef": user.compute.find_flavor(FLAVOR).id,
            "imageRef": make_image("forged", user),
            "networks": "none",
            "tags": [f"amphora:{amphora_id}", f"amphora-deployment:{deployment}"],
        }
        forged = user.compute.post("/servers", json={"server": body}, microversion="2.67").json()["server"]["id"]
        try:
            assert user.compute.get_server(forged).id == forged
            assert (nova.get(amphora_id), nova.machines(), nova.locations()) == (None, set(), {})
            nova.destroy(amphora_id)
            assert user.compute.get_server(forged).task_state != "deleting"
        finally:
            user.compute.delete_server(forged)


class TestProfiles:
    def test_existing_objects(self, nova, nova_admin, management):
        flavor = nova_admin.compute.find_flavor(FLAVOR)
        for name in (flavor.id, flavor.name):
            nova.validate_profile({"compute_flavor": name, "amp_image_tag": "nova-test"})
        zones = list(ZONES.values())
        nova.validate_profile({"compute_zone": zones[0], "management_network": management.id})
        nova.validate_profile({"compute_zones": zones})

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("compute_flavor", "missing"),
            ("amp_image_tag", "missing"),
            ("compute_zone", "missing"),
            ("compute_zones", ["az1", "missing"]),
            ("management_network", "missing"),
            ("volume_zone", "az1"),
        ],
    )
    def test_missing_objects(self, nova, key, value):
        with pytest.raises(UnsupportedOption, match=f"as {key}"):
            nova.validate_profile({key: value})

    def test_a_private_flavor_by_name(self, nova_cloud, nova):
        operator = nova_cloud.connect("admin", "admin").compute
        made = operator.create_flavor(name=new_id(), ram=64, vcpus=1, disk=1, is_public=False)
        try:
            nova.validate_profile({"compute_flavor": made.name})
        finally:
            operator.delete_flavor(made)


class TestNumberOfRequests:
    def test_boot_attach_and_removal(self, nova, record_property):
        running(nova, request())
        watched = Requests(nova)
        wanted = request()
        nova.boot(wanted)
        assert watched.made == ["GET servers", "POST servers"]
        watched.made.clear()
        settled(nova, wanted.amphora_id)
        polls, watched.made = len(watched.made), []
        nova.destroy(wanted.amphora_id)
        assert watched.made[:2] == ["GET servers", "DELETE servers"]
        record_property("requests_until_running", 2 + polls)
        record_property("requests_of_a_removal", len(watched.made))

    def test_lists_of_several_pages(self, make_nova, deployment, nova_admin):
        nova = make_nova(deployment, page_size=3)
        wanted = [request() for _ in range(8)]
        for one in wanted:
            nova.boot(one)
        # While servers are being built, Nova's pages can omit some of them.
        for one in wanted:
            settled(nova, one.amphora_id)
        assert nova.machines() == {one.amphora_id for one in wanted}
        assert nova.locations().keys() == {one.amphora_id for one in wanted}
        for one in wanted:
            nova.destroy(one.amphora_id)
        assert tagged(nova_admin, deployment) == []
        for one in wanted:
            assert ports_of(nova_admin, one.amphora_id) == []


def test_a_request_body_is_not_logged(nova, caplog):
    """Not even keystoneauth at the level DEBUG shows the keys of an amphora."""
    caplog.set_level("DEBUG")
    wanted = request()
    running(nova, wanted)
    assert "user_data" not in caplog.text
    with suppress(HttpException):
        nova.destroy(wanted.amphora_id)
