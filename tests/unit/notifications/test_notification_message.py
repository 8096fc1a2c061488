# SPDX-License-Identifier: Apache-2.0
"""Payload and message of a notification, as Octavia 19 and oslo.messaging write them."""

import json

import msgspec
import pytest

from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.notifications.envelope import build_message
from amphora_driver.notifications.outbox import Event, Notification
from amphora_driver.notifications.payload import build_payload

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP, name="shop", vip_sg_ids=("sg",), additional_vips=(VIP,))
PAYLOAD = {
    "loadbalancer_id": "lb",
    "name": "shop",
    "description": None,
    "project_id": "demo",
    "admin_state_up": True,
    "availability_zone": None,
    "vip_address": "198.51.100.10",
    "vip_network_id": "n1",
    "vip_port_id": "p1",
    "vip_subnet_id": "s1",
    "vip_qos_policy_id": None,
}
MESSAGE_ID = "0d6f2a34-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("change", "payload"),
    [
        ({}, {}),
        ({"flavor": {}}, {"flavor": {}}),
        ({"flavor": {"topology": "SINGLE"}}, {"flavor": {"topology": "SINGLE"}}),
        ({"availability_zone": {"compute_zone": "az1"}}, {}),
        ({"admin_state_up": False, "description": "ünï"}, {"admin_state_up": False, "description": "ünï"}),
        ({"vip_qos_policy_id": "q"}, {"vip_qos_policy_id": "q"}),
        (
            {"vip": Vip(address="", subnet_id="", network_id="", port_id="")},
            dict.fromkeys(("vip_address", "vip_network_id", "vip_port_id", "vip_subnet_id")),
        ),
    ],
)
def test_the_payload_has_the_keys_of_octavia_and_no_lists(change, payload):
    assert build_payload(msgspec.structs.replace(TREE, **change)) == PAYLOAD | payload


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (Event.CREATE, "octavia.loadbalancer.create.end"),
        (Event.UPDATE, "octavia.loadbalancer.update.end"),
        (Event.DELETE, "octavia.loadbalancer.delete.end"),
    ],
)
@pytest.mark.parametrize("publisher", [None, "octavia.host1"])
def test_the_message_has_the_format_2_of_oslo_messaging(event, name, publisher):
    one = Notification(
        id=1, message_id=MESSAGE_ID, event=event, ready_at=1790000000.0, payload=json.dumps(build_payload(TREE))
    )
    envelope = build_message(one, publisher)
    assert envelope == build_message(one, publisher), "a repeated message is the same one"
    assert envelope.keys() == {"oslo.version", "oslo.message"}
    assert envelope["oslo.version"] == "2.0"
    message = json.loads(envelope["oslo.message"])
    context = {key: message.pop(key) for key in list(message) if key.startswith("_context_")}
    assert message == {
        "message_id": MESSAGE_ID,
        "publisher_id": publisher,
        "event_type": name,
        "priority": "INFO",
        "payload": PAYLOAD,
        "timestamp": "2026-09-21 14:13:20.000000",
        "_unique_id": MESSAGE_ID.replace("-", ""),
    }
    assert context["_context_project_id"] == context["_context_project"] == "demo"
    assert context["_context_request_id"] == f"req-{MESSAGE_ID}"
    assert context["_context_user_identity"] == "- demo - - -"
    assert context["_context_auth_token"] is None
    assert context["_context_is_admin"] is False
