# SPDX-License-Identifier: Apache-2.0
"""The creation of a VIP port while other processes create or remove it: which answers of Neutron are tried again.

`tests/openstack/test_neutron_races.py` runs several processes on a real Neutron.
"""

import pytest

from amphora_driver.errors import NetworkError
from amphora_driver.network.neutron_vips import _ATTEMPTS, VipPorts
from amphora_driver.openstack.errors import ApiError

PORT, OTHER = {"id": "created"}, {"id": "of another process"}


def refusal(status, kind):
    return ApiError("POST /v2.0/ports", status, kind, "refused")


MAC, GROUP = refusal(409, "MacAddressInUse"), refusal(404, "SecurityGroupNotFound")
QUOTA, ADDRESS = refusal(409, "OverQuota"), refusal(409, "IpAddressInUse")
FAILED = refusal(500, "HTTPInternalServerError")


class Groups:
    def __init__(self):
        self.forgotten = 0

    def forget(self):
        self.forgotten += 1


def create(monkeypatch, answers, found):
    """Create a port with these answers to creations, and these ports in the lists after refusals."""
    groups = Groups()
    ports = VipPorts(None, None, groups, deployment_id="one")
    creations, lists = iter(answers), iter(found)

    def answer(*_):
        made = next(creations)
        if isinstance(made, ApiError):
            raise made
        return made

    monkeypatch.setattr(ports, "_create", answer)
    monkeypatch.setattr(ports, "_find", lambda *_: next(lists))
    return ports._find_or_create("lb", "project", (), "allocate"), groups.forgotten


@pytest.mark.parametrize(
    ("answers", "found", "port", "forgotten"),
    [
        ([PORT], [], PORT, 0),
        ([MAC], [OTHER], OTHER, 0),
        ([ADDRESS], [OTHER], OTHER, 0),
        ([MAC, PORT], [None], PORT, 0),
        ([MAC, MAC], [None, OTHER], OTHER, 0),
        ([GROUP, PORT], [], PORT, 1),
        ([GROUP, MAC, PORT], [None], PORT, 1),
        ([FAILED, PORT], [], PORT, 1),
        ([FAILED, MAC], [OTHER], OTHER, 1),
    ],
)
def test_a_port_that_others_change_is_found_or_created(monkeypatch, answers, found, port, forgotten):
    assert create(monkeypatch, answers, found) == (port, forgotten)


@pytest.mark.parametrize("error", [QUOTA, ADDRESS, refusal(503, "")])
def test_other_refusals_are_not_tried_again(monkeypatch, error):
    with pytest.raises(ApiError) as caught:
        create(monkeypatch, [error], [None])
    assert caught.value is error


def test_the_last_failure_of_neutron_is_reported(monkeypatch):
    with pytest.raises(ApiError) as caught:
        create(monkeypatch, [FAILED] * _ATTEMPTS, [])
    assert caught.value is FAILED


@pytest.mark.parametrize("error", [MAC, GROUP])
def test_the_number_of_attempts_is_limited(monkeypatch, error):
    with pytest.raises(NetworkError, match=f"changed it {_ATTEMPTS} times"):
        create(monkeypatch, [error] * _ATTEMPTS, [None] * _ATTEMPTS)


class Found:
    """Neutron with these ports in each list."""

    def __init__(self, *ports):
        self._ports = ports

    def find(self, *_words, **_filters):
        return list(self._ports)


@pytest.mark.parametrize(("named", "used"), [((), None), (("other",), None), (("mine",), "mine")])
def test_a_port_of_the_user_is_used_only_if_the_request_names_it(named, used):
    port = {"id": "mine", "description": "", "device_id": "lb-one", "device_owner": "", "created_at": "2026"}
    ports = VipPorts(Found(port), None, Groups(), deployment_id="one")
    found = ports._find("one", "project", named)
    assert (found and found["id"]) == used
