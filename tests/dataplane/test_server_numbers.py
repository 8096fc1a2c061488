# SPDX-License-Identifier: Apache-2.0
"""States of few servers of a large backend, read by their numbers from each HAProxy version."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from every_haproxy import RuntimeSocket, on_every_haproxy
from peers import MEMBER6, Answer
from wanted import id_of, listener, load_balancer, member, pool

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.haproxy.features import probe_features
from amphora_agent.haproxy.runtime_actions import RemoveServer
from amphora_agent.haproxy.runtime_commands import REMOVAL_SECONDS, ActionRunner
from amphora_agent.haproxy.runtime_state import SERVERS, parse_servers
from amphora_agent.haproxy.server_numbers import LARGE, ServerNumbers
from amphora_agent.haproxy.verify import Verifier

pytestmark = [pytest.mark.root, on_every_haproxy]
BACKEND = f"{id_of('pool', 'pool')}:{id_of('listener', 80)}"


@dataclass(frozen=True)
class Place:
    """The address of a member that does not run."""

    name: str
    address: str
    port: int = 80


def place(number: int) -> Place:
    address = f"2001:db8:1::{number + 1:x}" if number % 2 else f"198.51.{number // 250}.{1 + number % 250}"
    return Place(f"m{number}", address)


class Asked(RuntimeSocket):
    """The runtime socket, with its questions."""

    def __init__(self, amphora) -> None:
        self.questions: list[str] = []
        self.ask = lambda question: self.questions.append(question) or amphora.ask_haproxy(question)

    def order(self, command: str, success: str = "") -> None:
        assert self.ask(command).strip() == success


class Pool:
    """A pool of an amphora that the tests change at run time."""

    def __init__(self, served) -> None:
        self._served = served
        self.socket = Asked(served.amphora)
        self.text = ""

    def push(self, numbers, how: str = "runtime", timeout: int = 60_000, **changed) -> None:
        """Push members by number; `changed` has further values of a member by its name."""
        members = [member(place(n), **changed.get(place(n).name, {})) for n in numbers]
        pushed = self._served.push(load_balancer(listener(80, timeout_client_data=timeout), pool("pool", *members)))
        assert pushed.how == how, pushed.reason
        self.text = pushed.rendered.text

    def order(self, name: str, state: str) -> None:
        """Change the administrative state of a server as an operator."""
        self._served.amphora.ask_haproxy(f"set server {BACKEND}/{id_of('member', name)} state {state}")

    def list(self) -> str:
        return self._served.amphora.ask_haproxy(f"{SERVERS} {BACKEND}")

    def read(self, numbers: ServerNumbers, *names: str):
        """Return the states of servers by number; assert that they equal those of the list."""
        ids = {id_of("member", name) for name in names}
        found = numbers.read(self.socket, ids, parse(self.text).servers)
        if found is not None:
            assert found == {key: state for key, state in parse_servers(self.list()).items() if key[1] in ids}
        return found


@pytest.fixture
def large(served) -> Pool:
    made = Pool(served)
    served.push(load_balancer())
    made.push(range(LARGE), "start")
    return made


def test_the_states_equal_those_of_the_list(large):
    numbers = ServerNumbers.parse(large.list(), BACKEND)
    large.push(range(LARGE), m3={"weight": 7}, m4={"weight": 9})
    assert len(large.read(numbers, "m3", "m4")) == 2
    # Two removed servers leave the numbers of two added ones.
    large.push([*range(1, 400), *range(401, LARGE)])
    assert large.read(numbers, "m0", "m400") == {}
    assert len(numbers) == LARGE - 2
    large.push([*range(1, 400), *range(401, LARGE + 2)])
    assert len(large.read(numbers, f"m{LARGE}", f"m{LARGE + 1}")) == 2
    assert len(numbers) == LARGE
    # The numbers of added servers are known afterwards.
    large.push([*range(1, 400), *range(401, LARGE + 2)], **{f"m{LARGE}": {"weight": 5}})
    assert next(iter(large.read(numbers, f"m{LARGE}").values())).weight == 5


def test_the_agent_reads_the_list_once(large):
    verifier = Verifier(large.socket)
    verifier.verify(parse(large.text))

    def lists(numbers, *names: str, **changed) -> int:
        """Push members, verify the named ones, and return how many lists of states the agent has read."""
        large.push(numbers, **changed)
        large.socket.questions.clear()
        wanted = parse(large.text)
        loaded = verifier.verify(wanted, touched=[(BACKEND, id_of("member", name)) for name in names])
        assert loaded.members[BACKEND] == wanted.size
        return sum(question.startswith(SERVERS) for question in large.socket.questions)

    assert lists(range(LARGE + 1), f"m{LARGE}") == 1
    assert lists(range(LARGE + 1), "m3", m3={"weight": 7}) == 0
    assert lists(range(1, LARGE + 1), "m0", "m3") == 0
    assert lists(range(1, LARGE + 1), "m3", m3={"admin_state_up": False}) == 0
    assert lists(range(1, LARGE + 1), "m3", m3={"weight": 0}) == 1
    assert lists(range(LARGE + 1), "m0", "m3") == 0
    large.order("m3", "drain")
    with pytest.raises(HaproxyError, match="gets no new requests"):
        lists(range(LARGE + 1), "m3", "m4", m4={"weight": 7})


def test_a_state_that_statistics_do_not_express_is_not_returned(large):
    numbers = ServerNumbers.parse(large.list(), BACKEND)
    large.push(range(LARGE), m3={"weight": 0})
    assert large.read(numbers, "m3") is None


def test_the_states_of_disabled_and_enabled_servers_equal_those_of_the_list(large):
    numbers = ServerNumbers.parse(large.list(), BACKEND)
    large.push(range(LARGE), m3={"admin_state_up": False, "weight": 7})
    (state,) = large.read(numbers, "m3").values()
    assert (state.maintenance, state.weight, state.serves) == (True, 7, False)
    large.push(range(LARGE), m3={"weight": 7})
    assert [state.serves for state in large.read(numbers, "m3").values()] == [True]
    # A new server can be disabled.
    large.push(range(LARGE + 1), m3={"weight": 7}, **{f"m{LARGE}": {"admin_state_up": False}})
    assert [state.maintenance for state in large.read(numbers, f"m{LARGE}").values()] == [True]


def test_an_administrative_state_is_not_hidden(large):
    numbers = ServerNumbers.parse(large.list(), BACKEND)
    large.order("m3", "drain")
    assert large.read(numbers, "m3") is None
    large.order("m3", "maint")
    assert [state.maintenance for state in large.read(numbers, "m3").values()] == [True]
    large.order("m3", "ready")
    assert len(large.read(numbers, "m3")) == 1


def test_numbers_of_another_worker_are_not_used(large):
    """The next worker numbers the servers by their places in the file."""
    numbers = ServerNumbers.parse(large.list(), BACKEND)
    large.push(range(100, LARGE))
    large.push(range(100, LARGE + 100), "reload", timeout=60_001)
    large.push(range(100, LARGE + 100), timeout=60_001, m200={"weight": 7})
    assert large.read(numbers, "m200") is None
    assert len(large.read(ServerNumbers.parse(large.list(), BACKEND), "m200")) == 1


class Counters:
    """Records the servers whose counters are read before their removal."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []

    def sample_servers(self, servers) -> None:
        self.read += servers

    def settle_servers(self, _servers) -> None:
        pass


def test_a_server_is_removed_without_a_list(large, tmp_path):
    large.push(range(LARGE), m3={"weight": 7})
    expected = {name: str(number) for name, number in ServerNumbers.parse(large.list(), BACKEND)._servers.items()}
    verifier = Verifier(large.socket)
    wanted = parse(large.text)
    verifier.verify(wanted)
    verifier.verify(wanted, touched=[(BACKEND, id_of("member", "m3"))])
    gone, counters = id_of("member", "m7"), Counters()
    runner = ActionRunner(large.socket, probe_features(large.socket), counters, tmp_path, verifier.usage)
    large.socket.questions.clear()
    runner.run([RemoveServer(BACKEND, gone, disabled=False)])
    assert not [one for one in large.socket.questions if one.startswith(("show servers", SERVERS))]
    assert [server for _, server in counters.read] == [expected[gone]]
    assert (BACKEND, gone) not in parse_servers(large.list())


def test_a_member_of_a_large_pool_is_removed_during_requests(served):
    """The removal waits for running requests. A connection that became idle later would cause a reload."""

    def slow_answer(_seen) -> Answer:
        # Most removals begin during a request of this member.
        time.sleep(REMOVAL_SECONDS / 4)
        return Answer()

    kept, changing = member(served.web("kept")), member(served.web("changing", MEMBER6, answer=slow_answer))
    idle = [member(place(n), weight=0) for n in range(LARGE)]

    def push(*members) -> str:
        return served.push(load_balancer(listener(80), pool("pool", kept, *members, *idle))).how

    served.push(load_balancer())
    push(changing)
    with served.client.load(4) as load:
        for _ in range(5):
            assert push() == "runtime"
            assert push(changing) == "runtime"
            load.goes_on(8)
    assert load.failures == []


def test_a_small_backend_has_no_numbers(served):
    served.push(load_balancer())
    made = Pool(served)
    made.push(range(3), "start")
    assert ServerNumbers.parse(made.list(), BACKEND) is None
