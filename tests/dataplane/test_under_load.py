# SPDX-License-Identifier: Apache-2.0
"""Any number of changes does not disturb client traffic.

Invariant: traffic of every kind runs through a whole test and is verified after each part: no failed request, no
reset, no connection closed without notice, and every WebSocket and download ends in the regular way.
"""

from __future__ import annotations

import itertools

import pytest
from under_load import Prepared, Processes, Traffic, assert_nothing_failed, quick_members
from wanted import listener, load_balancer, member, monitor, pool

pytestmark = pytest.mark.root

# The limit of replaced workers. Long connections are spread over fewer generations.
WORKERS = 4
# A request that is sent this long after the removal must not reach the removed member.
REMOVED_SECONDS = 0.2
# A request that is sent earlier can wait for a processor of a busy machine.
LATE_SECONDS = 2.0
SHORT = ("kept", "hurried", "fresh", "tls kept", "tls fresh", "tls resumed")
LONG = ("websockets", "secure websockets", "downloads")
# A busy machine delays answers to checks; these tests do not measure the delay.
LENIENT = {"timeout": 5, "max_retries_down": 5}


@pytest.fixture
def traffic(served):
    made = Traffic(served)
    yield made
    made.close()


def balanced(*members):
    fronts = (
        listener(80, timeout_client_data=50_000),
        listener(443, protocol="TERMINATED_HTTPS", default_tls_container_ref="cert", timeout_client_data=50_000),
    )
    checks = monitor("HTTP", http_version=1.1, url_path="/check", **LENIENT)
    return load_balancer(*fronts, pool("pool", *map(member, members), monitor=checks))


def start_short(traffic: Traffic, tenant) -> None:
    """Start clients that send about 250 requests per second."""
    tls = {"port": 443, "trust": tenant.pem}
    traffic.start("kept", "kept", 8, port=80, pause=0.1)
    traffic.start("hurried", "kept", 1, port=80, pause=0.01)
    traffic.start("fresh", "fresh", 2, port=80, pause=0.05)
    traffic.start("tls kept", "kept", 4, pause=0.1, **tls)
    traffic.start("tls fresh", "fresh", 1, pause=0.1, **tls)
    traffic.start("tls resumed", "resumed", 1, pause=0.1, **tls)
    traffic.goes_on(*SHORT)


def start_long(traffic: Traffic, tenant, so_many: int) -> None:
    """Open more long connections, and wait until `so_many` of each kind exist."""
    traffic.start("websockets", "websocket", 3, port=80, pause=0.2)
    traffic.start("secure websockets", "websocket", 3, port=443, pause=0.2, trust=tenant.pem)
    traffic.start("downloads", "download", 3, port=80, pause=0)
    for name in LONG:
        traffic.until_alive(name, so_many)


def end_long(traffic: Traffic) -> dict[str, dict]:
    """End the long connections in the regular way, and return their report."""
    traffic.finish_downloads()
    return traffic.stop(*LONG)


@pytest.mark.quiet
@pytest.mark.feature("member.batch", "member.weight", "member.admin_state_up", "listener.default_tls_container_ref")
@pytest.mark.parametrize(
    ("changes", "replaced", "reloads"),
    [pytest.param(100, 10, 20, id="130"), pytest.param(500, 50, 50, id="600", marks=pytest.mark.extended)],
)
def test_many_changes_interrupt_no_request(served, traffic, tenant, changes, replaced, reloads):
    """No request fails during changes of members and certificates without a reload, and reloads."""
    members = quick_members("member", 8, 0)
    stable, changing = members[:4], members[4:]
    traffic.listen(members)
    certificates = [tenant.issue("www.example.com") for _ in range(3)]
    prepared = Prepared(served, balanced(*members), {"cert": certificates[0].pem}, workers=WORKERS)
    for each in changing:
        prepared.state[each.id] = None
    prepared.push()
    served.until_states("pool", {each.name: "UP" for each in stable})
    start_short(traffic, tenant)
    # Each measurement is of a reloaded worker with the short traffic only.
    _reload(prepared, 1)
    processes = Processes(served.amphora)
    before = processes.settled()
    start_long(traffic, tenant, 3)

    with processes:
        _change_members(prepared, changing, changes)
        assert_nothing_failed(traffic.report(), "member changes")
        _replace_certificates(prepared, itertools.cycle(certificates), replaced)
        assert_nothing_failed(traffic.report(), "certificates")
        unmoved = processes.workers
        assert (processes.most, len(unmoved)) == (1, 1), "members and certificates need no new worker"
        grown = processes.resident()

        for number in range(reloads):
            if number == reloads // 2:
                start_long(traffic, tenant, 6)
            _reload(prepared, 2 + number)
        traffic.goes_on(*SHORT)
        report = traffic.report()
        assert_nothing_failed(report, "reloads")
        assert {name: report[name]["alive"] for name in LONG} == dict.fromkeys(LONG, 6)
        assert len(processes.workers) > 1, "the long connections are on older workers"
    report = end_long(traffic)
    assert_nothing_failed(report, "long connections")
    assert {name: report[name]["finished"] for name in LONG} == dict.fromkeys(LONG, 6)
    # The limit counts replaced workers. The present one and, during a reload, a new one are added.
    assert processes.most <= WORKERS + 2
    after = processes.settled()
    # A worker's allocator keeps the memory of long connections for later ones. Changes need little memory. Without
    # clients, 14,740 kB grow to 15,160 after 1,000 added and removed members, and to 15,520 after 8,000 (2.6.12;
    # 3.0.11: 19,424, 20,036 and 20,172). Single changes leak no memory, so that no reload is necessary.
    assert grown <= before * 1.5, f"{before} kB before, {grown} kB after changes at run time"
    assert after <= before * 1.1, f"{before} kB before, {after} kB after"


def _change_members(prepared: Prepared, changing, times: int) -> None:
    """Add, weight, disable, enable and remove members, with one change in each push."""
    steps = ((1, False), (5, False), (5, True), (5, False), None)
    for number in range(times):
        each = changing[number // len(steps) % len(changing)]
        prepared.state[each.id] = steps[number % len(steps)]
        answered = prepared.push()
        assert answered.how == "runtime", answered


def _replace_certificates(prepared: Prepared, certificates, times: int) -> None:
    next(certificates)  # HAProxy has the first certificate already
    for _ in range(times):
        prepared.certificate("cert", next(certificates).pem)
        answered = prepared.push()
        assert answered.how == "runtime", answered


def _reload(prepared: Prepared, number: int) -> None:
    """Change an option that needs a new worker."""
    prepared.marks["timeout client 50000ms"] = f"timeout client {50_000 + number}ms"
    answered = prepared.push()
    assert answered.how == "reload", answered


@pytest.mark.feature("member.batch")
@pytest.mark.parametrize("with_a_reload", [False, True], ids=["at run time", "with a reload"])
def test_every_member_is_replaced_under_load(served, traffic, tenant, with_a_reload):
    """No request fails during a rolling upgrade, and removed members receive no request.

    After a reload, the old worker answers the next request of its clients before it closes their connections. It must
    not send this request to the removed member.
    """
    members = quick_members("roll", 8, 100)
    old, new = members[:4], members[4:]
    traffic.listen(members)
    certificate = tenant.issue("www.example.com")
    prepared = Prepared(served, balanced(*members), {"cert": certificate.pem}, workers=WORKERS)
    for each in new:
        prepared.state[each.id] = None
    prepared.push()
    served.until_states("pool", {each.name: "UP" for each in old})
    start_short(traffic, tenant)
    # The requests of these clients arrive long after the reload: an outdated worker would misdirect them.
    traffic.start("patient", "kept", 6, port=80, pause=2 * REMOVED_SECONDS)
    traffic.start("tls patient", "kept", 2, port=443, pause=2 * REMOVED_SECONDS, trust=tenant.pem)
    start_long(traffic, tenant, 3)
    removed = {}
    for number, (leaving, coming) in enumerate(zip(old, new, strict=True)):
        prepared.state[coming.id] = (1, False)
        prepared.push()
        prepared.state[leaving.id] = None
        if with_a_reload:
            prepared.marks["timeout client 50000ms"] = f"timeout client {51_000 + number}ms"
        removed[leaving] = prepared.push().at
        traffic.goes_on(*SHORT, "patient", "tls patient", requests=8)
    report = traffic.report()
    assert_nothing_failed(report, "replacing members")
    assert {name: report[name]["alive"] for name in LONG} == dict.fromkeys(LONG, 3)
    assert_nothing_failed(end_long(traffic), "long connections")
    for leaving, moment in removed.items():
        heard = traffic.heard(leaving)
        assert heard, f"{leaving.name} received no request before its removal"
        late = [(sent - moment, got - moment) for sent, got in heard if sent > moment + REMOVED_SECONDS]
        assert not late, f"{leaving.name} received requests after its removal (sent, received, s): {late[:5]}"
        assert max(got for _, got in heard) < moment + REMOVED_SECONDS + LATE_SECONDS
