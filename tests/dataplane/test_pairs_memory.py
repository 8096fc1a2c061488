# SPDX-License-Identifier: Apache-2.0
"""State that a pair shares: persistence, TLS sessions, and reports about the VIPs."""

from __future__ import annotations

import re
import socket
import ssl
import uuid

import pytest
from agent_heartbeats import decode
from amphora_lab import CONTROLLER, HEARTBEATS, eventually
from http_clients import CLIENT, CLIENT6, OTHER, OTHER6, trusting
from pair_lab import PLACES, VIP, VIP6
from peers import MEMBER, MEMBER6, WebServer
from wanted import listener, load_balancer, member, pool

# A standby takes over after 0.6 s without advertisements, and the tests measure outages.
pytestmark = [pytest.mark.root, pytest.mark.quiet]


@pytest.fixture
def members(pair):
    made = {
        name: WebServer(pair.members, name, address)
        for name, address in zip("abcd", (MEMBER, MEMBER6) * 2, strict=True)
    }
    yield made
    for each in made.values():
        each.close()


def _secure(members, secrets):
    kept = {"persistence": ("SOURCE_IP", None)}
    return load_balancer(
        listener(80, pool="address"),
        listener(81, pool="cookie"),
        listener(443, protocol="TERMINATED_HTTPS", pool="cookie", default_tls_container_ref="cert"),
        pool("address", *[member(each) for each in members.values()], **kept),
        pool("cookie", *[member(each) for each in members.values()], persistence=("HTTP_COOKIE", None)),
    )


def test_sessions_stick(pair, members, tenant):
    """The partner knows addresses, cookies and TLS sessions: they survive a crash."""
    secrets = {"cert": tenant.issue("www.example.com").pem}
    pair.push(_secure(members, secrets), secrets)
    clients = (CLIENT, CLIENT6, OTHER, OTHER6)

    def homes():
        return {
            source: pair.client.fetch(address=VIP6 if ":" in source else VIP, source=source).member
            for source in clients
        }

    before = homes()
    assert len(set(before.values())) == len(clients)  # round robin
    first = pair.client.fetch(port=81)
    cookie = first.values("Set-Cookie")[0].partition(";")[0]
    resumed, session = _resume(pair, trusting(), None)
    assert not resumed
    standby = pair.standby
    eventually(lambda: _remembered(standby) >= len(clients), "the partner has learned the clients")
    pair.holder.kill("haproxy", "keepalived")
    eventually(standby.holds, "the standby has the VIPs")
    assert homes() == before
    assert pair.client.fetch(port=81, headers=[("Cookie", cookie)]).member == first.member
    assert _resume(pair, session[0], session[1])[0]


def _remembered(node) -> int:
    return sum(map(int, re.findall(r"^# table: .*used:(\d+)", node.ask_haproxy("show table"), re.MULTILINE)))


def _resume(pair, tls, session):
    """Return whether the session was resumed, and the values for the next resumption.

    In TLS 1.2 the ticket arrives with the handshake.
    """
    tls.maximum_version = ssl.TLSVersion.TLSv1_2
    connection = pair.client.tls(443, tls=tls, session=session)
    try:
        return connection.session_reused, (tls, connection.session)
    finally:
        connection.close()


def test_a_partner_is_replaced(pair, members):
    """The holder gets a new partner: HAProxy reloads, the VIPs stay, and the partner learns the clients."""
    tree = load_balancer(
        listener(80, pool="address"),
        pool("address", *[member(each) for each in members.values()], persistence=("SOURCE_IP", None)),
    )
    pair.push(tree)
    home = pair.client.fetch(source=CLIENT).member
    holder, gone = pair.holder, pair.standby
    pair.lose(gone)
    with pair.poll(time_limit=5.0) as polling:  # the VIPs stay, also on a busy machine
        fresh = pair.boot(PLACES[2])
        eventually(fresh.answers, "the agent answers")
        first, second = pair.push(tree)
        assert (first.how, second.how) == ("reload", "start")
        assert "the peers of its stick tables changed" in first.reason
        eventually(lambda: _remembered(fresh) >= 1, "the new partner has learned the clients")
    assert pair.holder is holder
    assert polling.failed == []
    holder.kill("haproxy", "keepalived")
    eventually(fresh.holds, "the new partner has the VIPs")
    assert pair.client.fetch(source=CLIENT).member == home


def test_heartbeats_name_the_vip_holder(pair):
    """The agents report a new holder at once."""
    holder, standby = pair.holder, pair.standby
    receiver = pair.network.thread("ctl").run(_open_receiver)
    try:
        holder.kill("haproxy")
        heard = {holder.id: None, standby.id: None}

        def listen():
            header = receiver.recv(65536)
            for node in (holder, standby):
                if header[4:20] == uuid.UUID(node.id).bytes:
                    heard[node.id] = decode(header, node.key).document["holds_vip"]
            return heard == {holder.id: False, standby.id: True}

        eventually(listen, "both nodes report the new holder", 4.0)  # regular heartbeats come every five seconds
    finally:
        receiver.close()


def _open_receiver():
    opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind((CONTROLLER, HEARTBEATS))
    opened.settimeout(10)
    return opened
