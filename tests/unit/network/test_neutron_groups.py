# SPDX-License-Identifier: Apache-2.0
"""Security groups of the network backend `neutron`, which several processes create at the same moment.

`Cloud` is a Neutron without a network: its times are whole seconds, and it accepts several groups with one name.
"""

import datetime as dt
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import pytest

from amphora_driver.network import neutron_groups
from amphora_driver.network import neutron_objects as objects
from amphora_driver.network.neutron_client import Neutron
from amphora_driver.network.neutron_groups import Groups
from amphora_driver.network.neutron_references import References
from amphora_driver.network.neutron_rules import Group
from amphora_driver.openstack.errors import ApiError

NAME = "octavia-amphora-traffic"
SECONDS = 10.0
# Seconds since the epoch: the time of the races, and the time from which a group that nothing uses is deleted.
DURING = dt.datetime(2026, 1, 1, 10, 0, 10, tzinfo=dt.timezone.utc).timestamp()
AFTERWARDS = DURING + neutron_groups._MIN_AGE


@pytest.fixture
def clock(monkeypatch):
    """Sets the time of this host."""

    def set_time(now):
        monkeypatch.setattr(neutron_groups, "time", SimpleNamespace(time=lambda: now))

    set_time(DURING)
    return set_time


class Cloud:
    """The groups with their rules, and the ports that use them.

    Args:
        ids: the ids of the groups in the order of their creation.
        times: the creation times in the same order.
    """

    def __init__(self, ids=("1", "2", "3", "4"), times=("10:00:00",) * 4):
        self.groups = {}
        self.ports = []
        self._new = iter(zip(ids, times, strict=True))
        self._rules = 0

    def answer(self, method, path, params, body):
        _, kind, *rest = path.split("/")
        if kind == "extensions":
            return {"extensions": [{"alias": "stateful-security-group"}]}
        if kind == "security-group-rules":
            return self._create_rules(body["security_group_rules"])
        if kind == "ports":
            return self._create_port(body["port"]["security_groups"])
        match method, rest:
            case "GET", []:
                (name,) = (value for key, value in params if key == "name")
                return {"security_groups": [dict(one) for one in self.groups.values() if one["name"] == name]}
            case "POST", []:
                return {"security_group": self._create_group(body["security_group"])}
            case "PUT", [group_id, "tags"]:
                self._require(group_id)
                return {}
            case "DELETE", [group_id]:
                self._require(group_id)
                if group_id in self.ports:
                    raise ApiError(f"DELETE {path}", 409, "SecurityGroupInUse", "in use")
                del self.groups[group_id]
                return None
        raise AssertionError((method, path))

    def _require(self, group_id):
        if group_id not in self.groups:
            raise ApiError("request", 404, "SecurityGroupNotFound", "does not exist")

    def _create_group(self, values):
        group_id, created_at = next(self._new)
        made = {**values, "id": group_id, "created_at": f"2026-01-01T{created_at}Z", "security_group_rules": []}
        self.groups[group_id] = made
        for family in ("IPv4", "IPv6"):
            self._add_rule({
                "security_group_id": group_id, "direction": "egress", "ethertype": family, "protocol": None,
                "port_range_min": None, "port_range_max": None, "remote_ip_prefix": None, "remote_group_id": None,
            })  # fmt: skip
        return dict(self.groups[group_id])

    def _create_rules(self, rules):
        for rule in rules:
            self._require(rule["security_group_id"])
            for one in self.groups[rule["security_group_id"]]["security_group_rules"]:
                if {**one, "id": "", "project_id": ""} == {**rule, "id": "", "project_id": ""}:
                    raise ApiError("POST /security-group-rules", 409, "SecurityGroupRuleExists", "exists")
        for rule in rules:
            self._add_rule(rule)
        return {}

    def _add_rule(self, rule):
        self._rules += 1
        group = self.groups[rule["security_group_id"]]
        made = {"project_id": "service", **rule, "id": f"r{self._rules}"}
        group["security_group_rules"] = [*group["security_group_rules"], made]

    def _create_port(self, group_ids):
        for one in group_ids:
            self._require(one)
            self.ports.append(one)
        return {"port": {"id": f"p{len(self.ports)}"}}


class Process:
    """A process with its own cache that creates a port in the group of the deployment, as the product does.

    Args:
        cloud: answers the requests.
        before: called before each request.
    """

    def __init__(self, cloud, before=lambda: None):
        self._cloud = cloud
        self._before = before
        self.neutron = Neutron(self, page_size=100, cache_time=3600)
        self.groups = Groups(
            self.neutron, References(self.neutron), deployment_id="one", name="octavia-amphora", agent_port=9443,
            listener_rules=False,
        )  # fmt: skip

    def project_id(self):
        return "service"

    def request(self, method, path, *, params=(), json=None, headers=None, secret=False):
        self._before()
        return self._cloud.answer(method, path, params, json)

    def group(self):
        return self.groups.of_deployment(Group.TRAFFIC)

    def create_port(self):
        for _ in range(3):
            group_id = self.group()
            try:
                self.neutron.create("ports", {"security_groups": [group_id]})
            except ApiError as error:
                if error.kind != "SecurityGroupNotFound":
                    raise
                self.groups.forget()
            else:
                return group_id
        raise AssertionError("the group was deleted three times")


class Turns:
    """Runs functions in threads, of which only one runs at a time; each request to the cloud is a turn."""

    def __init__(self, number):
        self._go = [threading.Semaphore(0) for _ in range(number)]
        self._stopped = [threading.Semaphore(0) for _ in range(number)]
        self._ended = [False] * number
        self.results = [None] * number

    def before(self, number):
        def wait():
            self._stopped[number].release()
            assert self._go[number].acquire(timeout=SECONDS)

        return wait

    def start(self, number, work):
        def run():
            try:
                self.results[number] = work()
            finally:
                self._ended[number] = True
                self._stopped[number].release()

        thread = threading.Thread(target=run)
        thread.start()
        assert self._stopped[number].acquire(timeout=SECONDS)
        return thread

    def step(self, number, times):
        """Let a function send this number of requests."""
        for _ in range(times):
            if not self._ended[number]:
                self._go[number].release()
                assert self._stopped[number].acquire(timeout=SECONDS)


def rules_of(cloud):
    return {group_id: len(group["security_group_rules"]) for group_id, group in cloud.groups.items()}


def race(cloud, requests):
    """Two processes create a port; `requests` are the numbers of their requests in turn, before both finish."""
    turns = Turns(2)
    threads = [turns.start(one, Process(cloud, turns.before(one)).create_port) for one in range(2)]
    for number, times in enumerate((*requests, 100, 100)):
        turns.step(number % 2, times)
    for thread in threads:
        thread.join(SECONDS)
    return turns.results


# Times of Neutron are those of the requests, and not of the commits: the second group can be the older one.
@pytest.mark.parametrize(
    ("ids", "times", "several"),
    [
        (("1", "2", "3", "4"), ("10:00:00",) * 4, False),
        (("4", "3", "2", "1"), ("10:00:00",) * 4, True),
        (
            ("1", "2", "3", "4"),
            ("10:00:09", "10:00:08", "10:00:07", "10:00:06"),
            True,
        ),
    ],
    ids=["the smaller id first", "the smaller id last", "the older time last"],
)
def test_two_processes_agree_on_one_group_after_each_race(clock, ids, times, several):
    both = 0
    for requests in product(range(8), range(1, 9), (1, 3)):
        clock(DURING)
        cloud = Cloud(ids, times)
        used = race(cloud, requests)
        assert None not in used, requests
        created = set(cloud.groups)
        assert set(used) == set(cloud.ports) <= created, requests
        both += len(set(used)) == 2
        # The next process that lists the groups, and each one after it, uses the oldest one.
        kept = objects.oldest(list(cloud.groups.values()))["id"]
        assert {Process(cloud).group() for _ in range(2)} == {kept}
        assert set(cloud.groups) == created, requests
        # Two hours later, a group of a port stays. The newer group is deleted when its last port is gone.
        clock(AFTERWARDS)
        assert Process(cloud).group() == kept
        assert set(cloud.groups) == {kept, *used}, requests
        cloud.ports.clear()
        assert Process(cloud).group() == kept
        assert rules_of(cloud) == {kept: 4}, requests
    assert bool(both) is several, "in some orders of the requests, both processes use their own group"


def test_no_group_is_deleted_during_the_creation_of_a_port(clock):
    cloud = Cloud(ids=("2", "1", "3", "4"))
    first = Process(cloud)
    group_id = first.group()
    # Neutron has read the group "2" for the port of the first process, and does not see the port yet.
    cloud._create_group({"name": NAME, "description": objects.mark("one"), "project_id": "service"})
    assert Process(cloud).group() == "1"
    assert group_id in cloud.groups
    clock(AFTERWARDS)
    assert Process(cloud).group() == "1"
    assert set(cloud.groups) == {"1"}


def test_the_threads_of_a_process_create_one_group():
    cloud = Cloud()
    # Each thread sends its first request before the first answer arrives.
    process = Process(cloud, before=lambda: time.sleep(0.01))
    with ThreadPoolExecutor(4) as threads:
        found = [one.result() for one in [threads.submit(process.group) for _ in range(4)]]
    assert (found, rules_of(cloud)) == (["1"] * 4, {"1": 4})
    assert next(cloud._new)[0] == "2", "Neutron has created one group"


def test_a_thread_does_not_wait_for_another_one_for_ever(monkeypatch):
    monkeypatch.setattr(neutron_groups, "_MAX_WAIT", 0.01)
    cloud = Cloud()
    process = Process(cloud)
    with process.groups._reading:
        assert process.group() == "1"


def test_a_process_continues_with_the_older_group_when_its_own_one_is_deleted(clock):
    cloud = Cloud(ids=("2", "1", "3", "4"))
    first = Process(cloud)
    assert first.group() == "2"
    # The second process has listed the groups before the first one created its group.
    made = cloud._create_group({"name": NAME, "description": objects.mark("one"), "project_id": "service"})
    assert made["id"] == "1"
    clock(AFTERWARDS)
    assert Process(cloud).group() == "1"
    assert set(cloud.groups) == {"1"}
    assert first.create_port() == "1"


def test_no_group_is_deleted_while_a_port_uses_it(clock, caplog):
    cloud = Cloud(ids=("2", "1", "3", "4"))
    assert Process(cloud).create_port() == "2"
    cloud._create_group({"name": NAME, "description": objects.mark("one"), "project_id": "service"})
    clock(AFTERWARDS)
    assert Process(cloud).group() == "1"
    assert rules_of(cloud) == {"2": 4, "1": 4}
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_a_deletion_that_neutron_refuses_for_another_reason_is_logged(caplog):
    cloud = Cloud()
    for _ in range(2):
        cloud._create_group({"name": NAME, "description": objects.mark("one"), "project_id": "service"})
    process, answer = Process(cloud), cloud.answer

    def refuse(method, path, params, body):
        if method == "DELETE":
            raise ApiError(f"DELETE {path}", 403, "PolicyNotAuthorized", "not permitted")
        return answer(method, path, params, body)

    cloud.answer = refuse
    assert process.group() == "1"
    assert "could not delete the newer group 2" in caplog.text
