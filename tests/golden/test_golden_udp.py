# SPDX-License-Identifier: Apache-2.0
"""The virtual servers of a bundle equal the golden file, and the agent parses them unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import cases
import msgspec

from amphora_agent.l4 import model
from amphora_driver.model.enums import Algorithm, PersistenceType
from amphora_driver.model.loadbalancer import Profile, SessionPersistence
from amphora_driver.render.haproxy import render
from amphora_driver.render.udp import virtual_servers

FILE = Path(__file__).parent / "virtual_servers.json"


def kept(**more) -> SessionPersistence:
    return SessionPersistence(type=PersistenceType.SOURCE_IP, **more)


CASE = cases.balancer(
    [
        cases.listener(1, "UDP", 53, connection_limit=1000),
        cases.listener(2, "SCTP", 3868, pool=2),
        cases.listener(3, "UDP", 514, pool=1, admin_state_up=False),
        cases.listener(4, "UDP", 123, pool=None),
        cases.listener(5, "UDP", 69, pool=3),
        cases.listener(6, "HTTP", 53, pool=4),
        cases.listener(7, "UDP", 5060, pool=5),
    ],
    [
        cases.pool(
            1,
            "UDP",
            [
                cases.member(1, protocol_port=5353, weight=10),
                cases.member(2, weight=0),
                cases.member(3, "2001:DB8:0::3", backup=True, monitor_address="2001:db8::0:33", monitor_port=80),
                cases.member(4, admin_state_up=False),
            ],
            cases.monitor(
                "HTTP",
                http_method="HEAD",
                url_path="/health?q='\"#$HOME\\%[x]",
                expected_codes="200, 202-204",
                http_version=1.1,
                domain_name="www.example.com.",
            ),
            session_persistence=kept(persistence_timeout=60, persistence_granularity="255.255.255.0"),
        ),
        cases.pool(
            2,
            "SCTP",
            [cases.member(5, protocol_port=3868)],
            cases.monitor("SCTP", max_retries=1),
            lb_algorithm=Algorithm.SOURCE_IP,
            session_persistence=kept(persistence_granularity="ffff:ffff::"),
        ),
        cases.pool(3, "UDP", [cases.member(6)], admin_state_up=False),
        cases.pool(4, "HTTP", [cases.member(7)]),
        cases.pool(
            5, "UDP", [cases.member(8)], cases.monitor("UDP-CONNECT", admin_state_up=False),
            lb_algorithm=Algorithm.SOURCE_IP_PORT,
        ),
    ],
    additional_vips=(cases.vip("2001:db8:0::5"), cases.vip("198.51.100.6")),
    profile=Profile(client_address="preserved", connection_limit=500),
)  # fmt: skip


def test_the_virtual_servers_equal_the_golden_file(update_golden):
    made = virtual_servers(CASE)
    assert made.refused == ()
    text = msgspec.json.format(msgspec.json.encode(made.servers), indent=2).decode() + "\n"
    if update_golden:
        FILE.write_text(text)
    assert text == FILE.read_text()


def test_the_agent_reads_the_virtual_servers_unchanged():
    written = json.loads(FILE.read_text())
    assert json.loads(json.dumps(model.to_document(model.parse(written)))) == written


def test_udp_listeners_are_not_in_the_haproxy_configuration():
    only_http = msgspec.structs.replace(
        CASE,
        listeners=tuple(one for one in CASE.listeners if not one.uses_l4),
        pools=tuple(one for one in CASE.pools if not one.uses_l4),
    )
    assert render(CASE) == render(only_http)
