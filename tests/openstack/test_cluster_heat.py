# SPDX-License-Identifier: Apache-2.0
"""A group of the servers of a Heat stack: Heat, Nova, Octavia and Keystone are real, and the processes are ours.

The owner is the user `demo`, with an application credential.
"""

import json
import uuid

import pytest
from cluster_service import ClusterService, Traffic, serve_requests
from heat_service import Heat
from openstack.exceptions import NotFoundException
from whole_cloud import WITHOUT_GUEST

from sandbox import demo_hosts

pytestmark = [pytest.mark.extended, pytest.mark.lasts(900)]
MONITOR = {"type": "HTTP", "delay": 1, "timeout": 1, "max_retries": 1, "max_retries_down": 1}


@pytest.fixture(scope="module")
def heat(provider_stack):
    made = Heat(provider_stack.cloud)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def service(provider_stack, tmp_path):
    made = ClusterService(provider_stack.cloud, tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def credential_file(cloud_user, tmp_path):
    identity, user = cloud_user.connection.identity, cloud_user.connection.current_user_id
    made = identity.create_application_credential(user, uuid.uuid4().hex)
    path = tmp_path / "credential.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps({"id": made.id, "secret": made.secret, "project_id": cloud_user.project_id}))
    yield path
    identity.delete_application_credential(user, made)


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


def balancer_without_members(user):
    """A load balancer whose pool has a health monitor and no member; return it with the id of the pool."""
    pool = {"name": "heat", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN", "healthmonitor": MONITOR}
    made = user.load_balancer("heat", listeners=[user.listener("heat", default_pool=pool)])
    return made, next(iter(user.balancers.pools(loadbalancer_id=made.id))).id


def test_the_servers_of_a_stack(heat, service, cloud_user, credential_file):
    """Scale-out and scale-in of the stack fail no request, as in the how-to page; then the stack is deleted."""
    balancer, pool = balancer_without_members(cloud_user)
    stack = Stack(cloud_user)
    first, second = sorted(stack.servers())
    for one in (first, second):
        serve_requests(cloud_user, one)
    group = service.amphoractl(
        "create", "web", "--heat-stack", f"{stack.name}/web", "--load-balancer", balancer.id, "--pool", pool,
        "--port", str(demo_hosts.MEMBER_PORT), "--subnet", cloud_user.back_subnet.id, "--drain-seconds", "2",
        "--credential-file", str(credential_file),
    )["ID"]  # fmt: skip
    token = service.amphoractl("token", "create", "web", "--name", "heat")["Token"]

    def request(kind, *servers):
        status, found = service.call("POST", f"/v1/groups/{group}/{kind}?wait=240", token, {"servers": list(servers)})
        assert status == 200, (found, cloud_user.cloud.log("amphora-cluster"))

    def members():
        return {one.name for one in cloud_user.balancers.members(pool)}

    request("join", first, second)
    assert members() == {first, second}
    cloud_user.served(balancer.vip_address)
    with Traffic(cloud_user, balancer.vip_address) as traffic:
        request("leave", second)
        assert members() == {first}
        stack.update(1, [second])
        assert stack.servers() == {first}
        stack.update(2)
        [third] = stack.servers() - {first}
        serve_requests(cloud_user, third)
        request("join", third)
        assert members() == {first, third}
    assert set(traffic.answers) <= {first, second, third}, traffic.answers
    stack.delete()
    cloud_user.until(lambda: members() == set(), "the members of deleted servers are removed", 120)

    def shown():
        return service.call("GET", f"/v1/groups/{group}", token)[1]["group"]

    cloud_user.until(lambda: shown()["nodes"] == [], "the group has forgotten the servers")
    cloud_user.until(lambda: stack.name in (shown()["error"] or ""), "the group reports the missing stack")
    cloud_user.delete(balancer)
