# SPDX-License-Identifier: Apache-2.0
"""Rows of a database of revision 0001, for upgrades to later revisions."""

import json

import sqlalchemy as sa

from amphora_driver.model.secret_refs import Purpose, SecretName
from amphora_driver.store.amphorae import key_location
from amphora_driver.store.sealed_secrets import secret_location

KEY = b"c2l4dGVlbiBieXRlcy4uLnNpeHRlZW4gYnl0ZXMuLi4="
LB = "52cf0000-0000-4000-8000-000000000001"
LATER = "52cf0000-0000-4000-8000-000000000002"
LISTENER, POLICY, RULE = (f"{one}-0000-4000-8000-000000000001" for one in ("11500000", "17900000", "17e00000"))
POOL, MONITOR = "90010000-0000-4000-8000-000000000001", "4ea10000-0000-4000-8000-000000000001"
MEMBERS = tuple(f"3e3be000-0000-4000-8000-00000000000{number}" for number in (1, 2))
GONE = "3e3be000-0000-4000-8000-000000000009"
AMPHORA = "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"
NETWORK, SUBNET = "ae700000-0000-4000-8000-000000000001", "5b000000-0000-4000-8000-000000000001"
PORT = "90a70000-0000-4000-8000-000000000001"
_AT = 1_790_000_000.25
_ADDRESSES = [{"subnet_id": SUBNET, "address": "198.51.100.11"}]
_PLUGGED = [
    {
        "port": {"id": "p1", "network_id": NETWORK, "mac": "fa:16:3e:00:00:0b", "mtu": 1500, "addresses": _ADDRESSES},
        "subnets": [{"id": SUBNET, "network_id": NETWORK, "cidr": "198.51.100.0/24", "gateway": "198.51.100.1"}],
    }
]


def _object(kind, object_id, parent, refers_to=None, removed=False, **body):
    return {
        "id": object_id,
        "kind": kind,
        "load_balancer_id": LB,
        "parent_id": parent,
        "refers_to": refers_to,
        "created": 1,
        "generation": 3,
        "removed": removed,
        "body": json.dumps({"id": object_id, **body}),
    }


def _member(object_id, number, **more):
    return _object("members", object_id, POOL, pool_id=POOL, address=f"203.0.113.{number}", protocol_port=8080, **more)


def _job(load_balancer_id, **more):
    return {
        "load_balancer_id": load_balancer_id,
        "project_id": "project",
        "topology": "SINGLE",
        "compute": "netns",
        "network": "local",
        "op": "apply",
        "generation": 4,
        "committed": 4,
        "applied": 3,
        "read_back": False,
        "reread": None,
        "dirty": True,
        "tickets": 2,
        "tickets_due": _AT + 9e9,
        "owner": None,
        "epoch": 7,
        "leased_until": None,
        "due_at": 0.0,
        "attempts": 1,
        "error": "the agent did not answer",
        **more,
    }


def _status(object_id, kind, **more):
    return {
        "object_id": object_id,
        "kind": kind,
        "load_balancer_id": LB,
        "provisioning": "ACTIVE",
        "operating": "ONLINE",
        "reason": None,
        "since": _AT,
        "pending": None,
        "version": 4,
        "settled": 3,
        "reported": 4,
        **more,
    }


def _secret(object_id, purpose, ref):
    return secret_location(SecretName(object_id, Purpose(purpose), ref))


def rows(seal):
    """Return the rows by table. `seal` encrypts a secret for its location."""
    vip = {"address": "198.51.100.5", "subnet_id": SUBNET, "network_id": NETWORK, "port_id": PORT}
    return {
        "local_network": [{"id": NETWORK, "name": "vip", "bridge": "br-vip", "mtu": 1500}],
        "local_subnet": [
            {
                "id": SUBNET,
                "network_id": NETWORK,
                "name": "vip",
                "cidr": "198.51.100.0/24",
                "gateway": "198.51.100.1",
                "first_address": "198.51.100.2",
                "last_address": "198.51.100.254",
            }
        ],
        "local_port": [
            {"id": PORT, "network_id": NETWORK, "owner": f"lb-{LB}", "mac": "fa:16:3e:00:00:01", "ours": True},
        ],
        "local_address": [{"subnet_id": SUBNET, "address": "198.51.100.5", "port_id": PORT, "ordinal": 0}],
        "desired_object": [
            _object(
                "loadbalancers",
                LB,
                None,
                project_id="project",
                vip=vip,
                name="web — ünïcode",
                profile={"compute": "netns", "network": "local"},
            ),
            _object(
                "listeners",
                LISTENER,
                LB,
                POOL,
                loadbalancer_id=LB,
                protocol="TERMINATED_HTTPS",
                protocol_port=443,
                default_pool_id=POOL,
                default_tls_container_ref="http://secrets/1",
            ),
            _object("l7policies", POLICY, LISTENER, listener_id=LISTENER, action="REJECT", position=1),
            _object(
                "l7rules", RULE, POLICY, l7policy_id=POLICY, type="PATH", compare_type="STARTS_WITH", value="/private"
            ),
            _object("pools", POOL, LB, loadbalancer_id=LB, protocol="HTTP", session_persistence={"type": "SOURCE_IP"}),
            _object(
                "healthmonitors",
                MONITOR,
                POOL,
                pool_id=POOL,
                type="HTTP",
                delay=5,
                timeout=3,
                max_retries=2,
                url_path="/up",
            ),
            *(_member(one, number, weight=number) for number, one in enumerate(MEMBERS, start=1)),
            _member(GONE, 9, removed=True),
        ],
        "job": [_job(LB), _job(LATER, op="delete", dirty=False, applied=4, attempts=0, error=None)],
        "request": [
            {
                "load_balancer_id": LB,
                "generation": number,
                "action": action,
                "object_id": one,
                "accepted_at": _AT,
                "applied_at": None if number == 4 else _AT + number,
                "outcome": None if number == 4 else "reload",
            }
            for number, (action, one) in enumerate(
                (
                    ("loadbalancer_create", LB),
                    ("listener_create", LISTENER),
                    ("pool_create", POOL),
                    ("member_delete", GONE),
                ),
                start=1,
            )
        ],
        "secret": [
            {
                "object_id": LISTENER,
                "purpose": "certificate",
                "ref": "http://secrets/1",
                "load_balancer_id": LB,
                "sealed": seal(b"certificate and key", _secret(LISTENER, "certificate", "http://secrets/1")),
                "reason": None,
            },
            {
                "object_id": LB,
                "purpose": "tickets",
                "ref": "",
                "load_balancer_id": LB,
                "sealed": seal(b"t" * 32, _secret(LB, "tickets", "")),
                "reason": None,
            },
            {
                "object_id": POOL,
                "purpose": "ca",
                "ref": "http://secrets/2",
                "load_balancer_id": LB,
                "sealed": None,
                "reason": "it could not be read",
            },
        ],
        "object_status": [
            _status(LB, "loadbalancers", pending=4),
            _status(LISTENER, "listeners"),
            _status(POOL, "pools", pending=4),
            _status(MEMBERS[0], "members", operating="ERROR", version=5),
            _status(MEMBERS[1], "members"),
            _status(GONE, "members", pending=4),
        ],
        "listener_statistics": [
            {
                "listener_id": LISTENER,
                "amphora_id": AMPHORA,
                "load_balancer_id": LB,
                "active_connections": 3,
                "bytes_in": 2**40,
                "bytes_out": 2**41,
                "request_errors": 1,
                "total_connections": 2**33,
                "version": 9,
                "reported": 8,
            }
        ],
        "amphora": [
            {
                "id": AMPHORA,
                "load_balancer_id": LB,
                "role": "single",
                "state": "ready",
                "compute_id": AMPHORA,
                "management_address": "203.0.113.99",
                "confirmed": 3,
                "heartbeat_key": seal(b"h" * 32, key_location(AMPHORA)),
                "plugged": json.dumps(_PLUGGED),
                "partners": None,
                "handed_over": False,
                "drains_until": None,
                "certificate_expires_at": _AT + 600_000,
                "created_at": _AT - 20,
                "ready_at": _AT - 10,
                "reason": None,
            }
        ],
        "amphora_heartbeat": [
            {
                "amphora_id": AMPHORA,
                "seen_at": _AT + 5,
                "generation": 3,
                "epoch": 2**40,
                "sequence": 17,
                "holds_vip": None,
            }
        ],
        "duty": [{"name": "reporter", "owner": "host:1:2", "epoch": 3, "leased_until": _AT}],
        "vip_claim": [{"load_balancer_id": LATER, "network": "local", "claimed_at": _AT}],
    }


def fill(connection, seal):
    """Write the rows through the reflected tables; return them by table."""
    found = sa.MetaData()
    found.reflect(connection)
    written = rows(seal)
    assert set(written) <= set(found.tables)
    for table in found.sorted_tables:
        for row in written.get(table.name, ()):
            assert set(row) <= {one.name for one in table.columns}
            connection.execute(table.insert().values(**row))
    return written
