# SPDX-License-Identifier: Apache-2.0
"""Runs inside a guest whose kernel has IPVS: UDP and SCTP through the configuration that the agent generates.

    python3 guest_lvs.py DIRECTORY [NAME...]

DIRECTORY is the one that has `amphora_agent`; names are those of the checks, all without any. guest_lvs_lab.py is
beside this file. It needs root, keepalived, iproute2, nftables and the standard library. Clients, amphorae and their
members are network namespaces of the guest. A line of JSON is printed for each check; the status is 0 if all held.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace

sys.path.insert(0, sys.argv[1])

from guest_lvs_lab import (
    CLIENTS,
    MEMBERS,
    NODES,
    PORT,
    SCTP,
    SECOND,
    VIP,
    VIP6,
    Load,
    Node,
    answer,
    ask,
    build,
    eventually,
    flow,
    have_vips,
    listener,
    member,
    member_id,
    once,
    run,
    within,
)

from amphora_agent.bundle import Partner, Vrrp
from amphora_agent.l4.event_loop import Loop
from amphora_agent.l4.model import Persistence
from amphora_agent.l4_flow_log.stdout_writer import Outlet
from amphora_agent.l4_flow_log.writer import FlowLog
from amphora_agent.l4_ipvs import netlink, nft_rules
from amphora_agent.l4_nftables import conntrack
from amphora_agent.l4_nftables.engine import NftablesEngine

SINK = 5999


def check_weights_and_counters(node, _):
    server = listener([member(1, weight=2), member(2), member(1, 6), member(2, 6, weight=3)])
    node.serve(server)
    before = node.counters(server)
    found = once(30), once(20, vip=VIP6)
    assert found == ({"1": 20, "2": 10}, {"1": 5, "2": 15}), found
    with flow() as one:
        assert ask(one)[1] == "10.0.0.11"
    # The kernel sums up every two seconds.
    eventually(lambda: node.counters(server).total_connections - before.total_connections, 51)
    # 31 datagrams of 29 bytes by IPv4, 20 of 49 by IPv6.
    size = eventually(lambda: node.counters(server).bytes_in - before.bytes_in, 31 * 29 + 20 * 49)
    active = node.counters(server).active_connections
    return {"shares": found, "flows": 51, "bytes_in": size, "active": active}


def check_member_down_and_up(node, _):
    server = listener([member(1), member(2), member(3)], vips=(VIP,))
    node.serve(server)
    load = Load()
    load.for_a_while()
    had = Counter(load.owners)
    differs = node.checked(server, m2=False)
    eventually(differs, [])
    load.for_a_while()
    assert "2" not in load.owners, load.owners
    eventually(node.checked(server), [])
    found = once(6)
    assert found == {"1": 2, "2": 2, "3": 2}, found
    said = load.end()
    # Connection tracking still leads to the member that is gone: one datagram of each of its flows is lost.
    assert said["lost"] + said["refused"] <= 2 * had["2"], (said, had)
    assert set(said["changes"]) <= {"2>1", "2>3"}, said
    return {**said, "flows_of_the_member": had["2"]}


def summed_up(node, server):
    """How many flows began until now. Traffic goes on; the kernel sums up every two seconds, and may be about to."""
    for _ in range(2):
        before = node.counters(server).bytes_in
        eventually(lambda had=before: node.counters(server).bytes_in > had, seconds=60)
    return node.counters(server).total_connections


def check_changes_under_load(node, _):
    server = listener([member(1), member(2)], vips=(VIP,))
    node.serve(server)
    load = Load()
    load.for_a_while()
    services = summed_up(node, server)
    begun = time.monotonic()
    for changed in (
        replace(server, members=(*server.members, member(3))),
        replace(server, members=(*server.members, member(3, weight=9))),
        replace(server, algorithm="LEAST_CONNECTIONS", members=(*server.members, member(3))),
        replace(server, addresses=(*server.addresses, ipaddress.ip_address(SECOND))),
        replace(server, connection_limit=1000),
        server,
    ):
        node.serve(changed, listener([member(1)], port=PORT + 1, vips=(VIP,)))
        load.for_a_while(60)
    seconds = time.monotonic() - begun
    node.serve(server)
    counted = summed_up(node, server) - services
    said = load.end()
    assert services == len(load.flows)
    assert (said["lost"], said["refused"], said["changes"], counted) == (0, 0, {}, 0), (said, counted)
    return {**said, "changes_made": 7, "seconds": round(seconds, 1), "flows_begun_anew": counted}


def check_down_member_stays_out_of_a_reload(node, _):
    server = listener([member(1), member(2)], vips=(VIP,))
    node.serve(server, m2=False)
    load = Load(count=4)
    stop, found = threading.Event(), Counter()

    def look():
        while not stop.is_set():
            for one in node.inner.run(netlink.services):
                for each in one.destinations:
                    found[f"{each.address} weight {each.weight}"] += 1

    watching = threading.Thread(target=look)
    watching.start()
    for number in range(4):
        extra = [member(3)] if number % 2 else []
        vips = (VIP, SECOND) if number % 2 else (VIP,)
        node.serve(listener([member(1), member(2), *extra], vips=vips), m2=False)
        once(3)
    stop.set()
    watching.join()
    said = load.end()
    assert not any(key.startswith("10.0.0.2 ") and not key.endswith(" 0") for key in found), found
    assert (said["lost"], said["changes"]) == (0, {}), said
    return {"seen": dict(found), **said}


def check_drained_and_backup(node, _):
    server = listener([member(1), member(2), member(3, backup=True), member(4, backup=True)], vips=(VIP,))
    node.serve(server)
    assert once(4) == {"1": 2, "2": 2}
    with flow() as one, flow() as other:
        owners = ask(one)[0], ask(other)[0]
        drained = replace(server, members=(member(1, weight=0), member(2, weight=0), *server.members[2:]))
        node.serve(drained)
        assert (ask(one)[0], ask(other)[0]) == owners
        assert once(4) == {"3": 2, "4": 2}
        node.serve(replace(drained, members=drained.members[:2]))
        assert (ask(one)[0], ask(other)[0]) == owners
        assert once(1) == {"refused": 1}
        node.serve(server, m1=False, m2=False)
        assert once(4) == {"3": 2, "4": 2}
        node.serve(server, m1=False)
        assert once(2) == {"2": 2}
    return {}


def check_nobody(node, _):
    server = listener([member(1), member(1, 6)])
    node.serve(server, m1=False, m11=False)
    down = once(1), once(1, vip=VIP6)
    node.serve(replace(server, members=()))
    empty = once(1), once(1, vip=VIP6)
    assert (down, empty) == (({"refused": 1},) * 2,) * 2, (down, empty)
    return {}


def check_source_address(node, _):
    for bound in (None, Persistence(60, 32, 128)):
        algorithm = "ROUND_ROBIN" if bound else "SOURCE_IP"
        server = listener([member(n) for n in (1, 2, 3)], algorithm=algorithm, persistence=bound, vips=(VIP,))
        node.serve(server)
        found = [once(6, source=number) for number in (1, 2, 3, 4)]
        assert all(len(each) == 1 for each in found), found
        gone = next(iter(found[0]))
        node.serve(server, **{f"m{gone}": False})
        after = [once(2, source=number) for number in (1, 2, 3, 4)]
        for mine, theirs in zip(found, after, strict=True):
            assert gone not in theirs
            assert mine.keys() == theirs.keys() or gone in mine, (found, after)
    server = replace(server, persistence=Persistence(60, 24, 64))
    node.serve(server)
    assert len({next(iter(once(1, source=number))) for number in (1, 2, 3, 4)}) == 1
    server = listener([member(n) for n in (1, 2, 3)], algorithm="SOURCE_IP_PORT", vips=(VIP,))
    node.serve(server)
    spread = once(40)
    assert set(spread) == {"1", "2", "3"}, spread
    return {"by_port": spread}


def check_least_connections(node, _):
    server = listener([member(1)], algorithm="LEAST_CONNECTIONS", vips=(VIP,))
    node.serve(server)
    assert once(6) == {"1": 6}
    node.serve(replace(server, members=(member(1), member(2, weight=2))))
    found = once(12)
    assert found == {"2": 12}, found
    return {"active": node.counters(server).active_connections}


def check_limit(node, _):
    server = listener([member(1), member(1, 6)], limit=5)
    node.serve(server)
    with contextlib.ExitStack() as stack:
        flows = [stack.enter_context(flow(vip=VIP6 if n % 2 else VIP)) for n in range(8)]
        said = Counter(ask(one)[0] for one in flows)
        errors = node.counters(server).request_errors
    assert said == {"1": 5, "refused": 3}, said
    assert errors == 3, errors
    return {"refused": errors}


def check_client_address_preserved(node, _):
    node.serve(listener([member(1)], client="preserved", vips=(VIP,)))
    with flow(source=3) as one:
        found = ask(one)
    assert found == ("1", "198.51.100.103"), found
    return {}


def check_sctp(node, _):
    server = listener([member(1), member(2), member(1, 6)], protocol="SCTP")
    node.serve(server)
    sctp = {"kind": socket.SOCK_STREAM, "protocol": SCTP}
    found = once(10, **sctp), once(3, vip=VIP6, **sctp)
    assert found == ({"1": 5, "2": 5}, {"1": 3}), found
    eventually(lambda: node.counters(server).total_connections, 13)
    counted = node.counters(server)
    node.serve(server, m1=False)
    assert once(4, **sctp) == {"2": 4}
    node.serve(server, m1=False, m2=False)
    begun = time.monotonic()
    try:
        with flow(**sctp):
            refused = "connected"
    except OSError as error:
        refused = errno.errorcode.get(error.errno or 0, str(error))
    all_down = round(time.monotonic() - begun, 2)
    node.serve(replace(server, members=()))
    begun = time.monotonic()
    try:
        with flow(**sctp):
            empty = "connected"
    except OSError as error:
        empty = errno.errorcode.get(error.errno or 0, str(error))
    assert "connected" not in (refused, empty)
    return {
        "all_down": [refused, all_down],
        "no_member": [empty, round(time.monotonic() - begun, 2)],
        "bytes_out": counted.bytes_out,
    }


def check_keepalived_dies(node, _):
    server = listener([member(1), member(2)], vips=(VIP,))
    node.serve(server)
    load = Load(count=6)
    load.for_a_while(100)
    parent, child = (int(file.read_text()) for file in node.paths.lvs_pid_files)
    os.kill(parent, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    eventually(lambda: node.processes.status("keepalived-lvs"), None)
    load.for_a_while(100)
    without = Counter(load.lost), load.refused
    counted = node.counters(server)
    node.serve(server)
    load.for_a_while(100)
    said = load.end()
    assert (sum(without[0].values()), without[1]) == (0, 0), without
    assert node.counters(server).total_connections >= counted.total_connections
    return {"without_it": {"lost": 0}, "with_its_start": said}


def check_pair(node, other):
    local, there = (Partner(one.name, ipaddress.ip_address(f"198.51.100.{NODES[one.name]}")) for one in (node, other))
    node.vrrp = Vrrp("front", 7, 100, 1.0, local, (there,))
    other.vrrp = Vrrp("front", 7, 90, 1.0, there, (local,))
    server = listener([member(1), member(2), member(3)], vips=(VIP,))
    sctp = listener([member(1), member(2), member(3)], protocol="SCTP", client="preserved", vips=(VIP,))
    for one in (node, other):
        one.serve(server, sctp)
    # Round robin on the other node would begin anew: only what it was told can have it find the same members.
    once(2)
    load = Load(count=11)
    long_lived = [flow(kind=socket.SOCK_STREAM, protocol=SCTP) for _ in range(4)]
    owners = [ask(one)[0] for one in long_lived]
    for _ in range(3):
        assert [ask(one)[0] for one in long_lived] == owners
    load.for_a_while(300)

    def told():
        return other.counters(server).active_connections

    eventually(lambda: told() >= 11)
    begun = time.monotonic()
    have_vips("b")
    run(f"ip -n {MEMBERS} route replace 198.51.100.0/24 via 10.0.0.12")
    load.for_a_while(300)
    after = [ask(one, 20)[0] for one in long_lived]
    said = load.end()
    for one in long_lived:
        one.close()
    have_vips("a")
    run(f"ip -n {MEMBERS} route replace 198.51.100.0/24 via 10.0.0.11")
    other.rest()
    assert said["changes"] == {}, said
    assert after == owners, (owners, after)
    return {
        **said,
        "associations_kept": len(owners),
        "known_to_the_other": 11,
        "seconds": round(time.monotonic() - begun, 1),
    }


def check_flow_log(node, _):
    """Connection tracking knows IPVS's flows too, and where they went."""
    server = listener([member(1)], vips=(VIP,), log_format="%ci %si:%sp %s %U %B %[packets_in] %[packets_out]")
    loop, lines = Loop(), node.root / "lines"
    with lines.open("wb") as file:
        log = node.inner.run(lambda: FlowLog(loop, marked=False, outlet=lambda: Outlet(file.fileno())))
        node.inner.run(log.listen, (server,))
        node.serve(server)
        with flow() as one:
            assert ask(one)[1] == "10.0.0.11"
        node.inner.run(conntrack.end, [nft_rules.HIDDEN])
        node.inner.run(log.close)
    loop.close()
    (found,) = lines.read_text(encoding="ascii").splitlines()
    back = 28 + len("1 10.0.0.11 ?")
    assert found == f"198.51.100.101 10.0.0.1:{PORT} {member_id('m1')} 29 {back} 1 1", found
    return {"line": found}


def cost(vip):
    """Microseconds for a datagram of a flow that is known, and for one that begins a flow; one way, on one processor.

    Nobody else has anything to do meanwhile. Emulated, it is exact where the guest's clock counts instructions
    (qemu's -icount).
    """
    packets, flows = 4000, 500
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(flow(vip=vip, port=SINK))
        one.send(b"x" * 64)
        begun = time.monotonic()
        for _ in range(packets):
            one.send(b"x" * 64)
        packet = (time.monotonic() - begun) / packets
        fresh = [stack.enter_context(flow(vip=vip, port=SINK)) for _ in range(flows)]
        begun = time.monotonic()
        for each in fresh:
            each.send(b"x" * 64)
        return packet * 1e6, (time.monotonic() - begun) / flows * 1e6


def check_cost(node, _):
    """The sender's own work included: routed without either, by IPVS, by nftables."""
    sinks = in_members(lambda: [sink(number) for number in (1, 2, 3)])
    found = {}
    members = [replace(member(number), port=SINK) for number in (1, 2, 3)]
    engine = NftablesEngine()
    for _ in range(3):
        for algorithm in ("", "ROUND_ROBIN", "SOURCE_IP", "LEAST_CONNECTIONS"):
            if not algorithm:
                run(f"ip -n {CLIENTS} route add 10.0.0.0/24 via 198.51.100.11")
                found.setdefault("routed", []).append(cost("10.0.0.1"))
                run(f"ip -n {CLIENTS} route del 10.0.0.0/24")
                continue
            server = listener(members, port=SINK, algorithm=algorithm, vips=(VIP,))
            node.serve(server)
            found.setdefault(f"lvs {algorithm}", []).append(cost(VIP))
            node.rest()
            node.inner.run(engine.bring_about, (server,), {})
            found.setdefault(f"nftables {algorithm}", []).append(cost(VIP))
            node.inner.run(engine.release)
    for one in sinks:
        one.close()
    # Whatever else the guest has to do makes it more: the least is what it costs.
    least = {name: [round(min(each), 1) for each in zip(*said, strict=True)] for name, said in found.items()}
    return {"us_of_a_packet_and_of_a_first_one": least}


def in_members(action):
    """What it returns, done where the members are."""
    found = []

    def work():
        within(MEMBERS)
        found.extend(action())

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    return found


def sink(number):
    """Takes datagrams, and keeps few of them."""
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.bind((f"10.0.0.{number}", SINK))
    return one


CHECKS = {name[6:]: each for name, each in list(globals().items()) if name.startswith("check_")}


def main() -> int:
    run("modprobe -a ip_vs sctp nf_conntrack 2>/dev/null || true")
    build()
    threading.Thread(target=answer, daemon=True).start()
    nodes = [Node(name) for name in NODES]
    within(CLIENTS)
    eventually(lambda: nodes[0].inner.run(netlink.available))
    failed = 0
    for name in sys.argv[2:] or CHECKS:
        begun = time.monotonic()
        try:
            said = {"check": name, "ok": True, **CHECKS[name](*nodes)}
        except Exception as error:  # noqa: BLE001 (the next ones say more)
            traceback.print_exc()
            said = {"check": name, "ok": False, "why": repr(error)}
            failed += 1
            sys.stderr.write(nodes[0].log.read_text()[-1500:] if nodes[0].log.exists() else "")
        sys.stdout.write(json.dumps({**said, "took": round(time.monotonic() - begun, 1)}) + "\n")
        sys.stdout.flush()
        for node in nodes:
            node.rest()
    for node in nodes:
        node.inner.close()
    for name in (CLIENTS, MEMBERS, *(node.namespace for node in nodes)):
        run(f"ip netns del {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    os._exit(main())
