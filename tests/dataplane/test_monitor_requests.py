# SPDX-License-Identifier: Apache-2.0
"""Health monitors: the request to a member, the interval, and the accepted responses."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from http_clients import serving
from peers import MEMBER, MEMBER6, Answer
from wanted import id_of, listener, load_balancer, member, monitor, pool

from amphora_driver.validation.health_monitors import METHODS

pytestmark = pytest.mark.root


def watched_pools(monitors: dict, peer, **more):
    """Return a listener and a pool for each monitor; all pools have the same member."""
    parts = []
    for port, (name, watched) in enumerate(monitors.items(), 8000):
        target = member(peer, id=id_of("member", name))
        parts += [listener(port, pool=name), pool(name, target, monitor=watched, **more)]
    return parts


# -- the request ---------------------------------------------------------------------------------------------------


@pytest.mark.feature("healthmonitor.http_method", "healthmonitor.url_path")
@pytest.mark.parametrize("kind", ["HTTP", "HTTPS"])
def test_every_method(served, tenant, kind):
    web = served.web(tls=serving(tenant.issue("member.internal")) if kind == "HTTPS" else None)
    monitors = {each: monitor(kind, http_method=each, url_path=f"/{each}") for each in METHODS}
    monitors["unset"] = monitor(kind, url_path="/unset")
    served.push(load_balancer(*watched_pools(monitors, web)))
    for port, name in enumerate(monitors, 8000):
        (seen, *_) = web.hears(f"/{name}")
        assert (seen.method, seen.body) == ("GET" if name == "unset" else name, "")
        served.until_states(name, {name: "UP"}, port=port)


PATHS = (
    "/",
    "/a/b/../c",
    "/?a=b&c=d;e",
    "/%20%00%ff",
    "/%[src]",
    "/%{+Q}r%ci",
    "/$HOME/${HOME}",
    "/'single'",
    '/"double"',
    "/back\\slash\\",
    "/-f",
    "/#fragment",
    "/{a}|b^c`~!@*()_+=,<>:[]",
    "//double//",
    "/" + "x" * 254,
)


@pytest.mark.feature("healthmonitor.url_path")
@pytest.mark.parametrize("version", [1.0, 1.1])
def test_paths_arrive_as_they_were_written(served, version):
    web = served.web()
    monitors = {str(n): monitor("HTTP", http_version=version, url_path=path) for n, path in enumerate(PATHS)}
    served.push(load_balancer(*watched_pools(monitors, web)))
    web.until(lambda: {seen.target for seen in web.requests} >= set(PATHS), "all paths are requested")
    assert {seen.target for seen in web.requests} == set(PATHS)
    assert {seen.version for seen in web.requests} == {f"HTTP/{version}"}


@pytest.mark.feature("healthmonitor.http_version", "healthmonitor.domain_name")
@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
@pytest.mark.parametrize("kind", ["HTTP", "HTTPS"])
def test_versions_and_names(served, tenant, address, kind):
    """A check with HTTP/1.1 has a Host header: the name, or the member's address."""
    tls = serving(tenant.issue("member.internal")) if kind == "HTTPS" else None
    web = served.web(address=address, tls=tls)
    named = "www.health_1.example.com"
    monitors = {
        "1.0": monitor(kind, http_version=1.0, url_path="/1.0"),
        "1.0-named": monitor(kind, http_version=1.0, url_path="/1.0-named", domain_name=named),
        "1.1": monitor(kind, http_version=1.1, url_path="/1.1"),
        "1.1-named": monitor(kind, http_version=1.1, url_path="/1.1-named", domain_name=named),
        "unset": monitor(kind, url_path="/unset"),
    }
    served.push(load_balancer(*watched_pools(monitors, web)))
    found = {name: web.hears(f"/{name}")[0] for name in monitors}
    by_address = f"[{address}]:{web.port}" if ":" in address else f"{address}:{web.port}"
    assert {name: (seen.version, seen.values("Host")) for name, seen in found.items()} == {
        "1.0": ("HTTP/1.0", []),
        "1.0-named": ("HTTP/1.0", [named]),
        "1.1": ("HTTP/1.1", [by_address]),
        "1.1-named": ("HTTP/1.1", [named]),
        "unset": ("HTTP/1.0", []),
    }
    if tls is not None:
        assert {name: seen.tls.sni for name, seen in found.items()} == {
            name: named if "named" in name else None for name in monitors
        }


# -- the answer ----------------------------------------------------------------------------------------------------

CODES = {
    "200": {200},
    "204": {204},
    "200,202": {200, 202},
    "200, 301 ,404": {200, 301, 404},
    "200-204": {200, 202, 204},
    "201-203": {202},
    "200,400-404,503": {200, 400, 404, 503},
    "100-599": {200, 202, 204, 301, 400, 404, 500, 503},
    None: {200},
}
STATUSES = sorted(set.union(*CODES.values()))


@pytest.mark.feature("healthmonitor.expected_codes")
@pytest.mark.parametrize("kind", ["HTTP", "HTTPS"])
def test_expected_codes(served, tenant, kind):
    """A check accepts exactly the expected codes: one code, a list, a range, or a mixture."""
    tls = serving(tenant.issue("member.internal")) if kind == "HTTPS" else None
    peers = {
        status: served.web(str(status), tls=tls, answer=lambda seen, status=status: Answer(status=status))
        for status in STATUSES
    }
    parts = []
    for port, codes in enumerate(CODES, 8000):
        name = str(codes)
        members = [member(peer, id=id_of("member", f"{codes} {peer.name}")) for peer in peers.values()]
        parts += [listener(port, pool=name), pool(name, *members, monitor=monitor(kind, expected_codes=codes))]
    served.push(load_balancer(*parts))
    for port, (codes, wanted) in enumerate(CODES.items(), 8000):
        expected = {f"{codes} {status}": "UP" if status in wanted else "DOWN" for status in STATUSES}
        served.until_states(str(codes), expected, port=port)


# -- intervals -----------------------------------------------------------------------------------------------------


class ScriptedMember:
    """A member that follows a script, and records its status in HAProxy at each check.

    The status that is noted before an answer results from all earlier answers, and from no other.
    """

    def __init__(self, served, name: str, script: str) -> None:
        self.notes: list[str] = []
        self.times: list[float] = []
        self._served = served
        self._name = name
        self._script = script
        self._id = id_of("member", name)
        self.web = served.web(name, answer=self._answer)

    def _answer(self, _seen) -> Answer:
        place = len(self.notes)
        (state,) = self._served.status(self._id)
        self.times.append(time.monotonic())
        self.notes.append(state.partition(" ")[0])
        good = place >= len(self._script) or self._script[place] == "+"
        return Answer(status=200 if good else 500)

    def follow(self) -> str:
        """Return the state after each answer of the script: `u` up, `d` down."""
        wanted = len(self._script) + 1
        self.web.until(lambda: len(self.notes) >= wanted, f"{self._name} is checked {wanted} times", 30)
        return "".join("u" if note == "UP" else "d" for note in self.notes[1:wanted])


SCRIPTS = {
    # (rise, fall): (answers, states after them)
    (1, 1): ("+-+-++", "ududuu"),
    (2, 3): ("+--+---+-++", "uuuuuuddddu"),
    (3, 2): ("+-+--++-+++", "uuuudddddd" + "u"),
    (1, 4): ("+----+", "uuuudu"),
}


@pytest.mark.feature("healthmonitor.max_retries", "healthmonitor.max_retries_down", "healthmonitor.delay")
def test_rise_and_fall_are_counted_exactly(served):
    """`rise` or `fall` equal answers in a row change the state, and fewer do not. Checks keep the delay."""
    parts, patients = [], {}
    for port, ((rise, fall), (script, _)) in enumerate(SCRIPTS.items(), 8000):
        name = f"{rise} up, {fall} down"
        patient = patients[rise, fall] = ScriptedMember(served, name, script)
        watched = monitor("HTTP", max_retries=rise, max_retries_down=fall)
        parts += [listener(port, pool=name), pool(name, member(patient.web), monitor=watched)]
    slow = served.web("slow")
    times = []
    slow.answer = lambda seen: times.append(time.monotonic()) or Answer()
    parts += [listener(80), pool("pool", member(slow), monitor=monitor("HTTP", delay=3))]
    served.push(load_balancer(*parts))
    assert {key: patient.follow() for key, patient in patients.items()} == {
        key: states for key, (_, states) in SCRIPTS.items()
    }
    for asked, delay in ((patients[3, 2].times, 1), (times, 3)):
        pauses = [after - before for before, after in itertools.pairwise(asked)]
        assert len(pauses) >= 2
        # The sum, because a check that is noted late shortens the next pause.
        assert sum(pauses) >= delay * 0.9 * len(pauses), pauses
        assert sorted(pauses)[len(pauses) // 2] <= delay * 1.5, pauses


# With several checked backends, HAProxy 2.6 accepts a late answer that arrives before the next check.
@pytest.mark.feature_partly("healthmonitor.timeout")
@pytest.mark.parametrize("kind", ["HTTP", "HTTPS"])
def test_slow_member_is_down(served, tenant, kind):
    """The member is down after the time-out, before its late answer. With a longer time-out it is up."""
    over = threading.Event()
    late = served.web(tls=serving(tenant.issue("member.internal")) if kind == "HTTPS" else None)
    late.answer = lambda seen: Answer(status=200 if over.wait(1.7) else 202)

    def push(name: str, timeout: int) -> None:
        watched = monitor(kind, delay=4, timeout=timeout, expected_codes="202", url_path=f"/{name}")
        target = member(late, id=id_of("member", f"{name} {kind}"))
        served.push(load_balancer(listener(80), pool("pool", target, monitor=watched)))
        late.hears(f"/{name}")

    try:
        push("short", 1)
        served.until_states("pool", {f"short {kind}": "DOWN"})
        # HAProxy's own measurement, because the test may observe the change late.
        backend = f"{id_of('pool', 'pool')}:{id_of('listener', 80)}"
        checked = served.statistics()[backend, id_of("member", f"short {kind}")]
        assert checked["check_status"].endswith("TOUT"), checked["check_status"]
        assert int(checked["check_duration"]) >= 900
        push("long", 3)
        served.until_states("pool", {f"long {kind}": "UP"})
    finally:
        over.set()


@pytest.mark.feature_partly("healthmonitor.timeout")
@pytest.mark.feature("listener.timeout_member_connect")
@pytest.mark.parametrize("address", [MEMBER, MEMBER6])
def test_a_check_has_a_connect_timeout(served, address):
    """Checks use the connect time-out of requests, limited by the check interval."""
    full = served.full(address=address)
    # Each case has its own pool, so that HAProxy has no earlier state of the member.
    front = listener(80, pool=address, timeout_member_connect=600)
    began = time.monotonic()
    served.push(load_balancer(front, pool(address, member(full), monitor=monitor("TCP", delay=30, timeout=20))))
    served.until_states(address, {"full": "DOWN"}, seconds=5)
    assert time.monotonic() - began >= 0.6
