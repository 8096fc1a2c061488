# SPDX-License-Identifier: Apache-2.0
"""Requests of the network backend `neutron`: lists in pages, and groups that are deleted meanwhile."""

import pytest

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.network import VipOptions
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.neutron_client import Neutron
from amphora_driver.network.neutron_ports import AmphoraPorts
from amphora_driver.openstack.errors import ApiError, translated

AMPHORA = "0b8f7a54-3f1e-4c59-8f5d-7f1f0a9d2c02"


class Pages:
    """Neutron with five ports and its own limit of objects in one answer."""

    def __init__(self, limit):
        self.limit = limit
        self.requests = 0

    def request(self, method, path, *, params):
        self.requests += 1
        asked = dict(params)
        ids = [one for one in "abcde" if one > asked.get("marker", "")]
        most = min(self.limit, int(asked["limit"]))
        # Neutron adds the link if the page has as many objects as its limit, also to a last page.
        links = [{"rel": "next"}] if len(ids) >= most else []
        links += [{"rel": "previous"}] if "marker" in asked else []
        return {"ports": [{"id": one} for one in ids[:most]], **({"ports_links": links} if links else {})}


@pytest.mark.parametrize(
    ("page_size", "limit", "requests"), [(10, 10, 1), (5, 10, 2), (2, 10, 3), (10, 2, 3), (10, 5, 2), (1, 1, 6)]
)
def test_a_list_is_complete_whatever_neutrons_own_limit_is(page_size, limit, requests):
    service = Pages(limit)
    found = Neutron(service, page_size, 60).find_paged("ports", fields=("id",))
    assert ([one["id"] for one in found], service.requests) == (list("abcde"), requests)


class OnePort:
    """Neutron with one port of an amphora, and with these groups."""

    def __init__(self, *groups):
        self.groups = groups
        self.port = {
            "id": "p", "name": f"amphora-vip-{AMPHORA}", "description": objects.mark("one"), "project_id": "service",
            "binding:vnic_type": "normal", "qos_policy_id": None, "security_groups": ["former"],
            "fixed_ips": [{"subnet_id": "v4", "ip_address": "192.0.2.5"}], "allowed_address_pairs": [],
        }  # fmt: skip

    def project_id(self):
        return "service"

    def request(self, method, path, *, params=(), json=None, headers=None):
        if method == "GET":
            return {"ports": [self.port]}
        for one in json["port"]["security_groups"]:
            if one not in self.groups:
                raise ApiError(f"PUT {path}", 404, "SecurityGroupNotFound", f"Security group {one} does not exist")
        self.port = {**self.port, **json["port"]}
        return {"port": self.port}


class KnownGroups:
    """The cached ids of groups; the second one is read after `forget`."""

    def __init__(self, *known):
        self._known = list(known)

    def for_vips(self, *_words):
        return self._known[:1]

    def forget(self):
        self._known.pop(0)


def apply(service, groups):
    ports = AmphoraPorts(Neutron(service, 10, 60), None, groups, deployment_id="one", management_groups=())
    with translated("apply the options"):
        ports.apply_options("lb", "tenant", VipOptions(), ["p"], "apply the options")


def test_a_group_that_another_process_has_deleted_is_read_again():
    service = OnePort("oldest")
    apply(service, KnownGroups("newer", "oldest"))
    assert service.port["security_groups"] == ["oldest"]


def test_a_group_that_does_not_exist_is_refused():
    with pytest.raises(UnsupportedOption, match="group of the user does not exist"):
        apply(OnePort("oldest"), KnownGroups("newer", "group of the user"))
