# SPDX-License-Identifier: Apache-2.0
"""A controller and a health manager of any version, as a separate program that works with an amphora.

Invariant: the program imports the standard library, `amphora_driver` and this directory's builders only. It reads its
orders as JSON from standard input, and writes its results as JSON to standard output.
"""

import json
import socket
import sys
from types import SimpleNamespace

from wanted import LB, NETWORK, SUBNET, listener, load_balancer, member, pool

import amphora_driver
from amphora_driver.agent.client import AgentClient
from amphora_driver.health.heartbeat_codec import decode_datagram
from amphora_driver.model.amphora import AttachedPort
from amphora_driver.model.network import FixedAddress, Port, Subnet
from amphora_driver.render.bundle import Served, bundle
from amphora_driver.render.haproxy import render
from amphora_driver.secret import Secret


def body(told, generation, weight):
    """Return the bundle of a load balancer with one member."""
    peer = SimpleNamespace(name="m1", address=told["member"], port=80)
    tree = load_balancer(listener(80), pool("pool", member(peer, weight=weight)), additional_vips=())
    rendered = render(tree, shared_tickets=True)
    port = Port(
        id="port",
        network_id=NETWORK,
        mac=told["mac"],
        mtu=1500,
        addresses=(FixedAddress(subnet_id=SUBNET, address=told["fixed"]),),
    )
    subnet = Subnet(id=SUBNET, network_id=NETWORK, cidr="198.51.100.0/24", gateway="198.51.100.1")
    served = Served(text=rendered.text, pings=dict(rendered.pings))
    return bundle(tree, generation, told["amphora"], (AttachedPort(port=port, subnets=(subnet,)),), served)


def heard(told, opened):
    """Return the next report with a generation."""
    while True:
        report = decode_datagram(opened.recv(65536), Secret(bytes.fromhex(told["key"]))).report
        if report.generation:
            return {"generation": report.generation, "listeners": sorted(report.listeners), "holds": report.holds_vip}


def main():
    told = json.load(sys.stdin)
    conf = SimpleNamespace(
        amp_agent=SimpleNamespace(port=9443, connect_timeout=10.0, request_timeout=60.0),
        amp_certificates=SimpleNamespace(client_certificate=told["client"], ca_certificate=told["authority"]),
    )
    client, target = AgentClient(conf), (told["amphora"], told["address"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.bind((told["controller"], told["port"]))
        opened.settimeout(30)
        first = client.put_bundle(*target, body(told, 1, 1))
        second = client.put_bundle(*target, body(told, 2, 5))
        again = client.put_bundle(*target, body(told, 2, 5))
        report = heard(told, opened)
        while report["generation"] != 2:
            report = heard(told, opened)
    state, info = client.bundle_state(*target), client.info(*target)
    diagnosis = client.diagnostics(*target)
    client.close()
    with_news = decode_datagram(bytes.fromhex(told["datagram"]), Secret(bytes.fromhex(told["key"]))).report
    answers = {
        "code": amphora_driver.__file__,
        "load_balancer": LB,
        "how": [first.how, second.how, again.how],
        "loaded": first.loaded.members,
        "report": report,
        "state": [state.generation, state.digest],
        "info": [info.amphora_id, info.generation, sorted(info.capabilities)],
        "diagnosed": "haproxy.cfg" in diagnosis,
        "with_news": [with_news.generation, with_news.holds_vip],
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
