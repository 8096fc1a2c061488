# SPDX-License-Identifier: Apache-2.0
"""Our policy has the properties, defaults and conversions of Senlin 16.0.0's schema, for generated documents."""

import copy

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from senlin_process import Refused, Senlin

from amphora_cluster.policy import VipPolicy, from_mapping
from amphora_driver.errors import RequestError

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def senlin(tmp_path_factory):
    made = Senlin(tmp_path_factory.mktemp("senlin"))
    yield made
    made.close()


def number(least, most):
    """A number, which Senlin accepts as a text too."""
    numbers = st.integers(least, most)
    return numbers | numbers.map(str)


texts = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=20)
flags = st.booleans() | st.sampled_from(["true", "False", "yes", "off", "1", "0"])
protocols = st.sampled_from(["HTTP", "HTTPS", "TCP"])
ports = number(1, 65535)
persistences = st.sampled_from(
    [
        {},
        {"type": "NONE"},
        {"type": "SOURCE_IP"},
        {"type": "HTTP_COOKIE"},
        {"type": "APP_COOKIE", "cookie_name": "sid"},
    ]
)
POOL = {
    "protocol": protocols,
    "protocol_port": ports,
    "lb_method": st.sampled_from(["ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP"]),
    "admin_state_up": flags,
    "session_persistence": persistences,
}
VIP = {
    "network": texts,
    "address": st.ip_addresses().map(str),
    "connection_limit": number(-1, 10**6),
    "protocol": protocols,
    "protocol_port": ports,
    "admin_state_up": flags,
}
CHECK = {
    "delay": number(1, 1000),
    "timeout": number(1, 1000),
    "max_retries": number(1, 10),
    "admin_state_up": flags,
    "id": texts,
}
HTTP_CHECK = {
    "http_method": st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    "url_path": texts.map(lambda text: f"/{text}"),
    "expected_codes": st.sampled_from(["200", "200,202", "200-204"]),
}
monitors = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["PING", "TCP"]), **CHECK}) | (
    st.fixed_dictionaries({"type": st.sampled_from(["HTTP", "HTTPS"])}, optional={**CHECK, **HTTP_CHECK})
)
REST = {
    "health_monitor": monitors,
    "lb_status_timeout": number(1, 1000),
    "availability_zone": texts,
    "flavor_id": texts,
}
created = st.fixed_dictionaries(
    {
        "pool": st.fixed_dictionaries({"subnet": texts}, optional=POOL),
        "vip": st.fixed_dictionaries({"subnet": texts}, optional=VIP),
    },
    optional=REST,
)
existing = st.fixed_dictionaries(
    {"loadbalancer": texts, "pool": st.fixed_dictionaries({"subnet": texts, "id": texts}, optional=POOL)},
    optional={"vip": st.fixed_dictionaries({}, optional=VIP), **REST},
)
documents = (created | existing).map(
    lambda properties: {"type": "senlin.policy.loadbalance", "version": "1.3", "properties": properties}
)


def compared(document):
    """Our policy in Senlin's terms."""
    return without_empty_map(msgspec.to_builtins(from_mapping(document)))


def of_senlin(senlin, document):
    found = senlin("choices.properties", document)
    return without_empty_map({**found, "vip": found["vip"] or msgspec.to_builtins(VipPolicy())})


def without_empty_map(found):
    """Senlin has `{}` for a map that the document does not have, and else null for each missing value."""
    if not any(found["pool"]["session_persistence"].values()):
        found["pool"]["session_persistence"] = {}
    return found


@given(documents)
@settings(max_examples=200)
def test_values_and_defaults(senlin, document):
    assert compared(document) == of_senlin(senlin, document)


@given(documents, st.data())
@settings(max_examples=300)
def test_a_document_that_senlin_refuses_is_refused(senlin, document, data):
    spoiled = copy.deepcopy(document)
    place = spoiled["properties"]
    for _ in range(data.draw(st.integers(0, 1))):
        maps = [key for key, value in place.items() if isinstance(value, dict)]
        place = place[data.draw(st.sampled_from(maps))] if maps else place
    key = data.draw(st.sampled_from([*place, "unknown"]))
    place[key] = data.draw(st.sampled_from(["", "x", "-1", 0, -2, 10**12, 1.5, True, {}, [], {"x": 1}, "HTTP", "PING"]))
    try:
        found = compared(spoiled)
    except RequestError:
        return
    try:
        assert of_senlin(senlin, spoiled) == found
    except Refused as error:
        pytest.fail(f"Senlin refuses {spoiled}: {error}")
