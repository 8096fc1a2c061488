# SPDX-License-Identifier: Apache-2.0
"""Servers of a resource group, from answers in the form of Heat's API.

`tests/openstack/test_cluster_heat.py` has a real Heat.
"""

import msgspec
import pytest

from amphora_cluster.cloud.errors import CloudError, Missing
from amphora_cluster.cloud.heat import HeatStacks

URL = "http://heat/v1/p1/stacks"


def resource(name, kind, physical, stack, nested=None, status="CREATE_COMPLETE"):
    """A resource as Heat lists it. `stack` is NAME/ID."""
    links = [{"href": f"{URL}/{stack}/resources/{name}", "rel": "self"}, {"href": f"{URL}/{stack}", "rel": "stack"}]
    links += [{"href": f"{URL}/{nested}", "rel": "nested"}] if nested else []
    return {
        "resource_name": name, "logical_resource_id": name, "resource_type": kind, "physical_resource_id": physical,
        "resource_status": status, "links": links, "required_by": [], "creation_time": "2026-01-02T03:04:05Z",
    }  # fmt: skip


GROUP, SCALING, SERVER = "OS::Heat::ResourceGroup", "OS::Heat::AutoScalingGroup", "OS::Nova::Server"
RESOURCES = [
    resource("web", GROUP, "n1", "app/s1", "app-web/n1"),
    resource("deep", SCALING, "n2", "app/s1"),
    resource("single", SERVER, "server-s", "app/s1"),
    resource("starting", GROUP, "", "app/s1", status="CREATE_IN_PROGRESS"),
    resource("net", "OS::Neutron::Net", "net-1", "app/s1"),
    resource("0", SERVER, "server-0", "app-web/n1"),
    resource("1", SERVER, "server-1", "app-web/n1"),
    resource("2", SERVER, "", "app-web/n1", status="CREATE_IN_PROGRESS"),
    resource("3", SERVER, "server-3", "app-web/n1", status="DELETE_COMPLETE"),
    # A server in a template of its own, below an auto-scaling group: three stacks.
    resource("web", "member.yaml", "n3", "app-deep/n2", "app-deep-web/n3"),
    resource("server", SERVER, "server-deep", "app-deep-web/n3"),
]


class Connection:
    def __init__(self):
        self.requests = []

    def request(self, service, method, path, *, kind, wanted, params):
        self.requests.append((service, method, path, params))
        return msgspec.convert({"resources": RESOURCES}, type=kind)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("app/web", {"server-0", "server-1"}),
        ("s1/web", {"server-0", "server-1"}),
        ("app/s1/web", {"server-0", "server-1"}),
        ("app/deep", {"server-deep"}),
        ("app/single", {"server-s"}),
        ("app/starting", set()),
        ("app/net", set()),
    ],
)
def test_servers_of_a_resource(value, found):
    connection = Connection()
    assert HeatStacks(connection).server_ids(value) == found
    stack = value.rpartition("/")[0]
    assert connection.requests == [("heat", "GET", f"/stacks/{stack}/resources", [("nested_depth", "5")])]


def test_a_missing_resource():
    with pytest.raises(Missing, match="no resource unknown"):
        HeatStacks(Connection()).server_ids("app/unknown")


def test_a_resource_of_a_nested_stack_is_not_one_of_the_stack():
    with pytest.raises(Missing):
        HeatStacks(Connection()).server_ids("app/0")


@pytest.mark.parametrize("value", ["", "app", "/web", "app/"])
def test_a_value_in_another_form(value):
    with pytest.raises(CloudError, match="not STACK/RESOURCE"):
        HeatStacks(Connection()).server_ids(value)
