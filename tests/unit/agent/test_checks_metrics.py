# SPDX-License-Identifier: Apache-2.0
"""PROMETHEUS listeners also show UDP listeners, under the metric names that dashboards use."""

from __future__ import annotations

from amphora_agent.l4 import stat_rows
from amphora_agent.responder.prometheus import exposition

HAPROXY = (
    "Name: HAProxy\nPid: 7\n"
    "# pxname,svname,scur,stot,conn_tot,bin,bout,ereq,status,weight,act,type,mode,lastsess,lbtot\n"
    "web,FRONTEND,1,2,2,3,4,5,OPEN,,,0,http,,\n"
    "many,BACKEND,1,2,,3,4,,UP,1,1,1,http,9,\nmany,m1,1,2,,3,4,,UP,1,1,2,http,9,\n\n"
)
GIVEN = {"active_connections": 21, "total_connections": 22, "bytes_in": 23, "bytes_out": 24}
MEMBERS = {"u1": {"status": "DOWN", "weight": 3, **GIVEN}, "u2": {"status": "DRAIN", "weight": 0}}
COUNTED = {"active_connections": 11, "total_connections": 12, "bytes_in": 13, "bytes_out": 14, "request_errors": 15}
SERVER = {"status": "OPEN", **COUNTED, "pool": {"id": "p", "status": "UP", "members": MEMBERS}}


def test_virtual_servers_are_shown_beside_haproxy():
    told = "".join(exposition(HAPROXY, load=0, memory=0, others=stat_rows.render_rows({"dns": SERVER})))
    for line in (
        'octavia_listener_status{listener="dns",state="UP"} 1',
        'octavia_listener_current_sessions{listener="dns"} 11',
        'octavia_listener_sessions_total{listener="dns"} 12',
        'octavia_listener_connections_total{listener="dns"} 12',
        'octavia_listener_bytes_in_total{listener="dns"} 13',
        'octavia_listener_bytes_out_total{listener="dns"} 14',
        'octavia_listener_request_errors_total{listener="dns"} 15',
        'octavia_pool_status{pool="p:dns",state="UP"} 1',
        'octavia_pool_bytes_in_total{pool="p:dns"} 13',
        'octavia_member_status{pool="p:dns",member="u1",state="DOWN"} 1',
        'octavia_member_status{pool="p:dns",member="u2",state="DRAIN"} 1',
        'octavia_member_weight{pool="p:dns",member="u1"} 3',
        'octavia_member_current_sessions{pool="p:dns",member="u1"} 21',
        'octavia_member_sessions_total{pool="p:dns",member="u1"} 22',
        'octavia_member_loadbalanced_total{pool="p:dns",member="u1"} 22',
        'octavia_member_bytes_in_total{pool="p:dns",member="u1"} 23',
        'octavia_member_bytes_out_total{pool="p:dns",member="u1"} 24',
        'octavia_member_bytes_out_total{pool="p:dns",member="u2"} NaN',
        'octavia_listener_sessions_total{listener="web"} 2',
        'octavia_pool_last_session_seconds{pool="p:dns"} NaN',
    ):
        assert f"{line}\n" in told, line
    assert 'http_responses_total{listener="dns"' not in told


def test_without_virtual_servers_nothing_changes():
    before = "".join(exposition(HAPROXY, load=0, memory=0))
    assert "".join(exposition(HAPROXY, load=0, memory=0, others=stat_rows.render_rows({}))) == before
    alone = {**SERVER, "pool": None}
    assert 'octavia_listener_status{listener="dns",state="UP"} 1' in "".join(
        exposition(HAPROXY, load=0, memory=0, others=stat_rows.render_rows({"dns": alone}))
    )
