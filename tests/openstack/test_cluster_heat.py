# SPDX-License-Identifier: Apache-2.0
"""A group of the servers of a Heat stack: Heat, Nova, Octavia and Keystone are real, and the processes are ours.

The owner is the user `demo`, with an application credential.
"""

import uuid

import cluster_service
import pytest
from cluster_deployment import GroupCaller
from heat_service import Heat
from openstack.exceptions import NotFoundException
from whole_cloud import WITHOUT_GUEST

from sandbox import demo_hosts

pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]
# Seconds until a request of a client fails. HAProxy may try the new server, which does not answer yet, for the connect
# time-out of 5 s. Then it sends the request to the other member.
PATIENCE = 20.0


@pytest.fixture(scope="module")
def heat(provider_stack):
    made = Heat(provider_stack.cloud)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def service(cloud_user, tmp_path):
    with cluster_service.running(cloud_user, tmp_path) as made:
        yield made


class Stack:
    """A stack of the owner with a resource group `web` of servers."""

    def __init__(self, user):
        self._user, self._heat = user, user.connection.orchestration
        image = user.connection.image.create_image(
            name="web", data=b"no guest reads it", disk_format="raw", container_format="bare"
        )
        server = {
            "type": "OS::Nova::Server",
            "properties": {
                "flavor": WITHOUT_GUEST, "image": image.id, "networks": [{"network": user.back.id}],
                "user_data_format": "RAW", "config_drive": True,
            },
        }  # fmt: skip
        template = {
            "heat_template_version": "2021-04-16",
            "parameters": {"count": {"type": "number"}, "removed": {"type": "comma_delimited_list", "default": ""}},
            "resources": {
                "web": {
                    "type": "OS::Heat::ResourceGroup",
                    "properties": {
                        "count": {"get_param": "count"},
                        "removal_policies": [{"resource_list": {"get_param": "removed"}}],
                        "resource_def": server,
                    },
                }
            },
        }
        self.name = f"web-{uuid.uuid4().hex[:8]}"
        self._stack = self._heat.create_stack(name=self.name, template=template, parameters={"count": 2})
        self._ended("CREATE")

    def servers(self):
        """The ids of the stack's servers in Nova."""
        return {one.id for one in self._user.connection.compute.servers() if one.name.startswith(self.name)}

    def update(self, count, removed=()):
        """Change the number of servers; name servers that Heat removes first."""
        parameters = {"count": count, "removed": ",".join(removed)}
        before = self._heat.get_stack(self._stack.id).updated_at
        # As `openstack stack update --existing`, which the SDK does not have.
        answer = self._heat.patch(f"/stacks/{self.name}/{self._stack.id}", json={"parameters": parameters})
        assert answer.status_code == 202, answer.text
        self._ended("UPDATE", before)
        self._user.until(lambda: len(self.servers()) == count, f"the stack has {count} servers", 240)

    def delete(self):
        self._heat.delete_stack(self._stack)

        def gone():
            try:
                return self._heat.get_stack(self._stack.id).status == "DELETE_COMPLETE"
            except NotFoundException:
                return True

        self._user.until(gone, "the stack is deleted", 240)

    def _ended(self, action, before=None):
        """Wait for the end of an action. The time `before` of the previous update excludes the status of that one."""

        def ended():
            found = self._heat.get_stack(self._stack.id)
            assert not found.status.endswith("FAILED"), found.status_reason
            return found.status == f"{action}_COMPLETE" and (action == "CREATE" or found.updated_at != before)

        self._user.until(ended, f"the stack has the status {action}_COMPLETE", 240)


def test_the_servers_of_a_stack(heat, service, cloud_user):
    """Scale-out and scale-in of the stack fail no request, as in the how-to page; then the stack is deleted."""
    balancer, pool = cluster_service.balancer_without_members(cloud_user)
    stack = Stack(cloud_user)
    first, second = sorted(stack.servers())
    for one in (first, second):
        cluster_service.serve_requests(cloud_user, one)
    group = service.amphoractl(
        "create", "web", "--heat-stack", f"{stack.name}/web", "--load-balancer", balancer.id, "--pool", pool,
        "--port", str(demo_hosts.MEMBER_PORT), "--subnet", cloud_user.back_subnet.id, "--drain-seconds", "2",
        "--credential-file", str(service.folder / "credential.json"),
    )["ID"]  # fmt: skip
    web = GroupCaller(service, group, service.amphoractl("token", "create", "web", "--name", "heat")["Token"])

    def members():
        return {one.name for one in cloud_user.balancers.members(pool)}

    def failed():
        return {one.name for one in cloud_user.balancers.members(pool) if one.operating_status == "ERROR"}

    web.done("join", {"servers": [first, second]}, wait=240)
    assert members() == {first, second}
    cloud_user.served(balancer.vip_address)
    with cluster_service.traffic(cloud_user, balancer.vip_address, timeout=PATIENCE) as traffic:
        web.done("leave", {"servers": [second]}, wait=240)
        assert members() == {first}
        stack.update(1, [second])
        assert stack.servers() == {first}
        stack.update(2)
        [third] = stack.servers() - {first}
        # The group adds the server as soon as Nova shows it as ACTIVE. A real server then still boots.
        cloud_user.until(lambda: failed() == {third}, "the first check of the new server has failed")
        cluster_service.serve_requests(cloud_user, third)
        web.done("join", {"servers": [third]}, wait=240)
        assert (members(), failed()) == ({first, third}, set())
        both = {first, third}
        cloud_user.until(lambda: set(cloud_user.answers(balancer.vip_address)) == both, "both servers answer", 30)
    assert traffic.failed == 0, traffic.answers
    stack.delete()
    cloud_user.until(lambda: members() == set(), "the members of deleted servers are removed", 120)
    web.until(lambda: web.shown()["nodes"] == [], "the group has forgotten the servers")
    web.fails(stack.name)
    cloud_user.delete(balancer)
