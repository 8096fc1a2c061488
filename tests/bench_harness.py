# SPDX-License-Identifier: Apache-2.0
"""A minimal stand-in for the harness of the side-by-side benchmark.

The harness is not part of this repository, and a clone may lack it. So the tests build the same documents themselves.
"""

from __future__ import annotations

import importlib
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parent
BENCHMARKS = TESTS.parent / "benchmarks"
# New connections in each heartbeat, as many as in the harness: a single one would hide a wrong factor.
CONNECTIONS = 7


def identifier(*words):
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, "/".join(map(str, words))))


def spec(tag="0", *, tls=False, policy=False):
    """Return a load balancer of size S: one listener, one pool, two members.

    Args:
        tls: the listener terminates TLS, as in the harness's size L.
        policy: the listener has an L7 policy with a rule, as in the harness's size M.
    """
    pool = {
        "id": identifier("pool", tag),
        "name": "pool0",
        "protocol": "HTTP",
        "algorithm": "ROUND_ROBIN",
        "healthmonitor": {
            "id": identifier("monitor", tag),
            "type": "HTTP",
            "delay": 5,
            "timeout": 3,
            "fall": 3,
            "rise": 2,
            "http_method": "GET",
            "url_path": "/healthz",
            "expected_codes": "200-204",
        },
        "members": [
            {"id": member, "ip": f"10.200.0.{number}", "port": 8000, "weight": number}
            # The store returns members in the order of their ids.
            for number, member in enumerate(sorted(identifier("member", n, tag) for n in (1, 2)), start=1)
        ],
    }
    listener = {
        "id": identifier("listener", tag),
        "name": "listener0",
        "port": 20000,
        "protocol": "TERMINATED_HTTPS" if tls else "HTTP",
        "tls": tls,
        "tls_ref": identifier("certificate", tag),
        "connection_limit": 500,
        "insert_headers": {"X-Forwarded-For": "true", "X-Forwarded-Port": "true"},
        "default_pool_id": pool["id"],
        "l7policies": [_policy(tag)] if policy else [],
    }
    return {
        "id": identifier("load balancer", tag),
        "name": f"lb-S-{tag}",
        "project_id": identifier("project", tag).replace("-", ""),
        "topology": "SINGLE",
        "enabled": True,
        "vip": {
            "ip": "10.1.2.10",
            "subnet_id": identifier("subnet", tag),
            "network_id": identifier("network", tag),
            "port_id": identifier("VIP's port", tag),
        },
        "amphorae": [
            {
                "id": identifier("amphora", tag),
                "compute_id": identifier("machine", tag),
                "lb_network_ip": "192.0.2.10",
                "vrrp_ip": "10.1.2.20",
                "vrrp_port_id": identifier("amphora's port", tag),
                "ha_port_id": identifier("VIP's port", tag),
                "role": "STANDALONE",
                "priority": 100,
            }
        ],
        "pools": [pool],
        "listeners": [listener],
    }


def _policy(tag):
    return {
        "id": identifier("policy", tag),
        "position": 1,
        "action": "REDIRECT_TO_URL",
        "redirect_url": "http://www.example.com/u1",
        "redirect_prefix": None,
        "redirect_pool_id": None,
        "redirect_http_code": 302,
        "rules": [
            {
                "id": identifier("rule", tag),
                "type": "HEADER",
                "compare_type": "EQUAL_TO",
                "key": "X-Tenant",
                "value": "tenant 1",
                "invert": False,
            }
        ],
    }


def heartbeat(whole, sequence=0, down=()):
    """Return the message of an amphora: statuses, and counters since the previous message."""
    (listener,), (pool,) = whole["listeners"], whole["pools"]
    stats = {"tx": 1460, "rx": 730, "conns": 3, "totconns": CONNECTIONS, "ereq": 0}
    members = {one["id"]: "DOWN" if one["id"] in down else "UP" for one in pool["members"]}
    return {
        "id": whole["amphorae"][0]["id"],
        "seq": sequence,
        "ver": 3,
        "listeners": {listener["id"]: {"status": "OPEN", "stats": stats}},
        "pools": {f"{pool['id']}:{listener['id']}": {"status": "UP", "members": members}},
    }


class Adapter:
    """The base class of adapters in the harness."""

    def __init__(self, workdir):
        self.workdir = workdir

    def hb_apply_batch(self, datagrams):
        for one in datagrams:
            self.hb_apply(one)


@contextmanager
def importable(**modules):
    """Make the folder of the benchmarks and these modules importable, and remove all of them afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        for name, content in modules.items():
            made = ModuleType(name.replace("_", "."))
            vars(made).update(content)
            patch.setitem(sys.modules, made.__name__, made)
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if _is_below(sys.modules[name], BENCHMARKS):
                    del sys.modules[name]


@contextmanager
def imported_anew():
    """Hide the modules of tests and benchmarks, so that a program imports only its own modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [place for place in sys.path if not Path(place).is_relative_to(TESTS)])
        sys.path.insert(0, str(BENCHMARKS))
        for name in _own_modules():
            patch.delitem(sys.modules, name)
        try:
            yield
        finally:
            for name in _own_modules():
                del sys.modules[name]


def _own_modules():
    return [name for name, one in sys.modules.items() if _is_below(one, TESTS) or _is_below(one, BENCHMARKS)]


def _is_below(module, folder):
    return Path(getattr(module, "__file__", None) or "/").is_relative_to(folder)


@contextmanager
def adapters():
    """Yield the module `adapter`, imported as the harness's worker imports it."""
    with importable(adapters={}, adapters_api={"Adapter": Adapter}):
        yield importlib.import_module("adapter")
