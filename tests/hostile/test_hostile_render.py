# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in a field, the directives are those of the model, or the object was refused."""

from __future__ import annotations

import msgspec
import pytest
from corpus import STRINGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reading import directives, haproxy_takes

from amphora_driver.model.loadbalancer import HealthMonitor, Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.model.vocabulary import ListenerProtocol, MonitorType, PoolProtocol
from amphora_driver.render.haproxy import render

change = msgspec.structs.replace

MEMBER = Member(id="m1", pool_id="p1", address="192.0.2.1", protocol_port=80)
MONITOR = HealthMonitor(
    id="h1",
    pool_id="p1",
    type=MonitorType.HTTP,
    delay=5,
    timeout=3,
    max_retries=2,
    url_path="/",
    domain_name="example.com",
    http_version=1.1,
)
POOL = Pool(id="p1", loadbalancer_id="b", protocol=PoolProtocol.HTTP, members=(MEMBER,), healthmonitor=MONITOR)
LISTENER = Listener(
    id="l1", loadbalancer_id="b", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="p1"
)
VIP = Vip(address="198.51.100.5", subnet_id="s", network_id="n", port_id="p")
LB = LoadBalancer(id="b", project_id="x", vip=VIP, listeners=(LISTENER,), pools=(POOL,))


def member(**changes) -> LoadBalancer:
    return change(LB, pools=(change(POOL, members=(change(MEMBER, **changes),)),))


def monitor(**changes) -> LoadBalancer:
    return change(LB, pools=(change(POOL, healthmonitor=change(MONITOR, **changes)),))


# Every text of the model that reaches the configuration, or that somebody could think does: a load balancer with
# the value in that field, and the object it belongs to (None where the value is the object's id).
FIELDS = {
    "vip address": (lambda v: change(LB, additional_vips=(change(VIP, address=v),)), "b"),
    "listener id": (lambda v: change(LB, listeners=(change(LISTENER, id=v),)), None),
    "listener name": (lambda v: change(LB, listeners=(change(LISTENER, name=v),)), "l1"),
    "pool id": (
        lambda v: change(LB, listeners=(change(LISTENER, default_pool_id=v),), pools=(change(POOL, id=v),)),
        None,
    ),
    "pool name": (lambda v: change(LB, pools=(change(POOL, name=v),)), "p1"),
    "member id": (lambda v: member(id=v), None),
    "member name": (lambda v: member(name=v), "m1"),
    "member address": (lambda v: member(address=v), "m1"),
    "monitor address": (lambda v: member(monitor_address=v), "m1"),
    "http_method": (lambda v: monitor(http_method=v), "h1"),
    "url_path": (lambda v: monitor(url_path=v), "h1"),
    "url_path tail": (lambda v: monitor(url_path=f"/{v}"), "h1"),
    "expected_codes": (lambda v: monitor(expected_codes=v), "h1"),
    "domain_name": (lambda v: monitor(domain_name=v), "h1"),
}

# Where the value stands in the directives when it is taken; what stands around it never changes.
PLACES = {
    "http_method": ("http-check send", 3),
    "url_path": ("http-check send", 5),
    "url_path tail": ("http-check send", 5),
    "domain_name": ("http-check send", 10),
    "expected_codes": ("http-check expect", 3),
}
BASE = directives(render(LB).text)


def check(field: str, value: str) -> str | None:
    """The text if the value was taken; None if it was refused."""
    make, at_fault = FIELDS[field]
    rendered = render(make(value))
    if rendered.refused:
        assert (at_fault or value) in {error.object_id for error in rendered.refused}
        for found in directives(rendered.text or ""):
            assert found in BASE or found[0] == "server", "a refused value left a trace"
        return None
    found = directives(rendered.text)
    if field.endswith("name") and field != "domain_name":
        assert found == BASE
    assert [line[0] for line in found if line[0] != "bind"] == [line[0] for line in BASE if line[0] != "bind"]
    if value and field in PLACES:
        start, index = PLACES[field]
        (line,) = (line for line in found if line[:2] == start.split())
        (base,) = (line for line in BASE if line[:2] == start.split())
        wanted = f"/{value}" if field == "url_path tail" else value
        if field == "expected_codes":
            wanted = wanted.replace(" ", "")
        assert line[index] == wanted
        assert line[:index] + line[index + 1 :] == base[:index] + base[index + 1 :]
    return rendered.text


@pytest.mark.parametrize("field", FIELDS)
def test_corpus(field, tmp_path):
    taken = [text for value in STRINGS if (text := check(field, value)) is not None]
    for text in dict.fromkeys(taken):
        haproxy_takes(text, tmp_path)


SPECIAL = "ab0 \t\n\r\0'\"\\#$%{}[]()-_./:@,;|&~<>\x7f\x85\u2028\ud800é"
TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=SPECIAL, max_size=40),
    st.text(alphabet=[chr(code) for code in range(0x21, 0x7F)], max_size=40),
    st.sampled_from(STRINGS),
    st.ip_addresses().map(str),
    st.from_regex(r"[1-5][0-9]{2}(, ?[1-5][0-9]{2}){0,3}", fullmatch=True),
)


@pytest.mark.parametrize("field", FIELDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=TEXTS)
def test_any_text(field, value):
    check(field, value)


def test_haproxy_takes_whatever_is_taken(tmp_path):
    """One load balancer with a pool for each value: a thousand values in one run of HAProxy."""
    listeners, pools = [], []

    @settings(max_examples=1000, deadline=None, database=None)
    @given(path=TEXTS, host=TEXTS, codes=TEXTS, address=TEXTS, monitor_address=TEXTS)
    def collect(path, host, codes, address, monitor_address):
        number = len(pools)
        asks = change(MONITOR, id=f"h{number}", url_path=f"/{path}")
        if number % 2:
            asks = change(asks, domain_name=host, expected_codes=codes)
        serves = change(MEMBER, id=f"m{number}", address=address, monitor_address=monitor_address)
        good = change(MEMBER, id=f"n{number}")
        pools.append(change(POOL, id=f"p{number}", healthmonitor=asks, members=(serves, good)))
        listener = change(LISTENER, id=f"l{number}", protocol_port=number + 1, default_pool_id=f"p{number}")
        listeners.append(listener)

    collect()
    rendered = render(change(LB, listeners=tuple(listeners), pools=tuple(pools)))
    assert rendered.text.count("\nfrontend ") == len(listeners)
    assert rendered.text.count("http-check send") > 50
    haproxy_takes(rendered.text, tmp_path)
