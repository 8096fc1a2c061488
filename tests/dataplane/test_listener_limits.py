# SPDX-License-Identifier: Apache-2.0
"""Listener limits: connections, time-outs, and allowed CIDRs."""

from __future__ import annotations

import select
import socket
import time

import pytest
from amphora_lab import eventually
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6, VIPS, ask, ended, trusting, upgrade
from peers import MEMBER, MEMBER6
from wanted import VIP, VIP6, id_of, listener, load_balancer, member, pool

from amphora_driver.model.loadbalancer import Profile

pytestmark = pytest.mark.root

# Tolerance between a timer and its observation on a busy machine.
LATE = 2.5


def lasts(seconds: float, wanted: float) -> bool:
    return wanted * 0.9 <= seconds <= wanted + LATE


# -- connections ---------------------------------------------------------------------------------------------------


@pytest.mark.feature("listener.connection_limit")
@pytest.mark.parametrize("vip", VIPS)
def test_the_connection_limit_is_exact(served, vip):
    """A connection over the limit waits until another one ends; each listener has its own limit."""
    echo = served.echo()
    served.push(
        load_balancer(
            listener(80, protocol="TCP", connection_limit=3),
            listener(81, protocol="TCP"),
            pool("pool", member(echo), protocol="TCP"),
        )
    )
    inside = [served.client.connect(80, vip) for _ in range(3)]
    assert [each.recv(100) for each in inside] == [b"echo\n"] * 3
    waiting = served.client.connect(80, vip)  # the kernel accepts the connection, HAProxy does not
    assert served.client.connect(81, vip).recv(100) == b"echo\n"
    waiting.settimeout(0.3)
    with pytest.raises(TimeoutError):
        waiting.recv(100)
    assert echo.connections == 4
    inside.pop().close()
    waiting.settimeout(10)
    assert waiting.recv(100) == b"echo\n"


@pytest.mark.feature("listener.connection_limit")
def test_a_connection_limit_is_changed_and_removed(served):
    def tree(limit, usual=None):
        return load_balancer(
            listener(80, protocol="TCP", connection_limit=limit),
            pool("pool", member(echo), protocol="TCP"),
            profile=Profile(connection_limit=usual),
        )

    def admitted(wanted: int) -> int:
        """Return how many of six connections are served: wait for the wanted ones, then briefly for more."""
        opened = [served.client.connect() for _ in range(6)]
        greeted: set[socket.socket] = set()
        while waiting := {*opened} - greeted:
            heard, _, _ = select.select([*waiting], [], [], 10 if len(greeted) < wanted else 0.25)
            if not heard:
                break
            greeted |= {each for each in heard if each.recv(100) == b"echo\n"}
        for each in opened:
            each.close()
        frontend = (id_of("listener", 80), "FRONTEND")
        eventually(lambda: served.statistics()[frontend]["scur"] == "0", "all connections have ended")
        return len(greeted)

    echo = served.echo()
    for limit, usual, wanted in ((2, None, 2), (4, 2, 4), (-1, None, 6), (-1, 3, 3)):
        served.push(tree(limit, usual))
        assert admitted(wanted) == wanted


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.quiet
@pytest.mark.feature("listener.timeout_client_data")
@pytest.mark.parametrize(
    ("protocol", "vip"), [("TCP", VIP), pytest.param("TCP", VIP6, marks=pytest.mark.extended), ("HTTP", VIP)]
)
def test_the_client_timeout(served, protocol, vip):
    peer = served.web() if protocol == "HTTP" else served.silent()
    served.push(
        load_balancer(
            listener(80, protocol=protocol, timeout_client_data=500), pool("pool", member(peer), protocol=protocol)
        )
    )
    connection = served.client.connect(80, vip)
    if protocol == "HTTP":
        assert ask(connection).status == 200
    assert lasts(ended(connection), 0.5)


@pytest.mark.quiet
@pytest.mark.feature("listener.timeout-member-data")
@pytest.mark.parametrize("protocol", ["TCP", "HTTP"])
def test_the_member_timeout(served, protocol):
    silent = served.silent()
    served.push(
        load_balancer(
            listener(80, protocol=protocol, timeout_member_data=500), pool("pool", member(silent), protocol=protocol)
        )
    )
    connection = served.client.connect()
    begin = time.monotonic()
    if protocol == "HTTP":
        reply = ask(connection)
        assert reply.status == 504
        assert silent.heard.startswith(b"GET / HTTP/1.1\r\n")
    else:
        connection.sendall(b"hello?")
        ended(connection)
        assert silent.heard == b"hello?"
    assert lasts(time.monotonic() - begin, 0.5)


@pytest.mark.quiet
@pytest.mark.feature("listener.timeout_member_connect")
@pytest.mark.parametrize("address", [MEMBER, pytest.param(MEMBER6, marks=pytest.mark.extended)])
def test_the_member_connect_timeout(served, address):
    """HAProxy retries (`retries 3`); each attempt has the configured time-out."""
    full = served.full(address=address)
    served.push(load_balancer(listener(80, timeout_member_connect=200), pool("pool", member(full))))
    begin = time.monotonic()
    assert served.client.fetch().status == 503
    assert lasts(time.monotonic() - begin, 4 * 0.2)


@pytest.mark.quiet
@pytest.mark.feature_partly("listener.timeout-tcp-inspect")
@pytest.mark.parametrize("protocol", ["TCP", "HTTP"])
def test_a_late_request_is_served(served, protocol):
    """The time-out limits the inspection of data, not its arrival: HAProxy closes no connection."""
    peer = served.echo() if protocol == "TCP" else served.web()
    served.push(
        load_balancer(
            listener(80, protocol=protocol, timeout_tcp_inspect=600), pool("pool", member(peer), protocol=protocol)
        )
    )
    connection = served.client.connect()
    begin = time.monotonic()
    if protocol == "TCP":
        assert connection.recv(100) == b"echo\n"  # HAProxy does not delay a member that sends first
        assert time.monotonic() - begin < 0.6
    connection.settimeout(0.8)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    if protocol == "TCP":
        connection.sendall(b"late")
        assert connection.recv(100) == b"late"
    else:
        assert ask(connection).status == 200


@pytest.mark.quiet
@pytest.mark.feature("listener.timeout_client_data")
@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.extended), True])
def test_an_upgraded_connection_has_its_own_timeout(served, tenant, tls):
    """The connection ends at the tunnel time-out, not at those of client and member."""
    peer = served.web()
    tree = load_balancer(
        listener(80, timeout_client_data=300, timeout_member_data=300),
        listener(
            443,
            protocol="TERMINATED_HTTPS",
            default_tls_container_ref="cert",
            timeout_client_data=300,
            timeout_member_data=300,
        ),
        pool("pool", member(peer)),
        profile=Profile(timeout_tunnel=2000),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    connection = served.client.tls(443, tls=trusting(tenant)) if tls else served.client.connect()
    assert upgrade(connection).status == 101
    connection.settimeout(0.9)  # three times the other time-outs
    with pytest.raises(TimeoutError):
        connection.recv(100)
    connection.settimeout(10)
    connection.sendall(b"still here")
    assert connection.recv(100) == b"still here"
    assert lasts(ended(connection), 2.0)


# -- clients --------------------------------------------------------------------------------------------------------


def admits(served, port: int, source: str, protocol: str = "HTTP") -> bool:
    """Return whether the listener serves a client with this source address."""
    vip = VIP6 if ":" in source else VIP
    if protocol == "HTTP":
        return not served.client.refused(port, vip, source=source, timeout=3)
    try:
        return served.client.connect(port, vip, source=source, timeout=3).recv(100) == b"echo\n"
    except OSError:
        return False


@pytest.mark.feature("listener.allowed_cidr")
@pytest.mark.parametrize("protocol", ["HTTP", "TCP"])
def test_only_allowed_clients_are_served(served, protocol):
    peer = served.web() if protocol == "HTTP" else served.echo()

    def serve(*cidrs):
        first = listener(80, protocol=protocol, allowed_cidrs=cidrs or None)
        second = listener(81, protocol=protocol, allowed_cidrs=(f"{OTHER}/32",))
        served.push(load_balancer(first, second, pool("pool", member(peer), protocol=protocol)))

    everything = {CLIENT, CLIENT6, OTHER, OTHER6}
    for cidrs, wanted in (
        ((f"{CLIENT}/32",), {CLIENT}),
        ((f"{CLIENT6}/128", f"{OTHER}/32"), {CLIENT6, OTHER}),
        (("198.51.100.0/24",), {CLIENT, OTHER}),
        (("2001:db8:1::/64",), {CLIENT6, OTHER6}),
        (("203.0.113.0/24",), set()),
        (("0.0.0.0/0", "::/0"), everything),
        ((), everything),
    ):
        serve(*cidrs)
        assert {source for source in everything if admits(served, 80, source, protocol)} == wanted, cidrs
    # Each listener has its own list.
    assert {source for source in everything if admits(served, 81, source, protocol)} == {OTHER}


@pytest.mark.feature("listener.allowed_cidr")
def test_a_client_that_is_not_allowed_sees_no_certificate(served, tenant):
    tree = load_balancer(
        listener(
            443,
            protocol="TERMINATED_HTTPS",
            default_tls_container_ref="cert",
            allowed_cidrs=(f"{CLIENT}/32", f"{CLIENT6}/128"),
        ),
        pool("pool", member(served.web())),
    )
    served.push(tree, {"cert": tenant.issue("www.example.com").pem})
    tls = trusting(tenant)
    for vip, allowed, other in ((VIP, CLIENT, OTHER), (VIP6, CLIENT6, OTHER6)):
        assert served.client.fetch(port=443, address=vip, tls=tls, source=allowed).status == 200
        with pytest.raises(OSError):
            served.client.tls(443, vip, tls=tls, source=other)
