# SPDX-License-Identifier: Apache-2.0
"""Measures the outage of a pair for a client: every kind of event, at several advertisement intervals.

    .sandbox/test-venv/bin/python benchmarks/failover.py [--adverts 0.2 1] [--times N]

A client sends a request on a new connection every 10 ms. The outage is the time from the first failed request to the
last one. The output has the median and the worst of N runs in milliseconds, and the failed requests of the worst one.
Needs root.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dataplane"), str(ROOT / "tests")]

from amphora_lab import eventually  # noqa: E402 (only after sys.path is set)
from pair_lab import PLACES, Pair, PairNetwork  # noqa: E402
from throwaway_authority import Authority  # noqa: E402
from wanted import listener, load_balancer, member, pool  # noqa: E402

EVENTS = {
    "power cut": lambda pair, node: (node.everything(signal.SIGKILL), pair.network.cut(node.where)),
    "cable cut": lambda pair, node: pair.network.cut(node.where),
    "HAProxy killed": lambda _, node: node.kill("haproxy"),
    "HAProxy frozen": lambda _, node: node.send("haproxy", signal.SIGSTOP),
    "keepalived killed": lambda _, node: node.kill("keepalived"),
    "both killed": lambda _, node: node.kill("haproxy", "keepalived"),
    "everything frozen": lambda _, node: node.everything(signal.SIGSTOP),
    "handed over": lambda pair, node: _hand_over(pair, node),  # noqa: PLW0108 (defined further down)
}


def main():
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adverts", type=float, nargs="+", default=[0.2, 1.0], help="intervals in seconds")
    parser.add_argument("--times", type=int, default=3, help="runs of each event")
    chosen = parser.parse_args()
    print(f"{'milliseconds':20}" + "".join(f"{f'advert {advert:g} s':>28}" for advert in chosen.adverts))
    print(f"{'':20}" + f"{'median':>12}{'worst':>8}{'failed':>8}" * len(chosen.adverts))
    columns = [_measure(advert, chosen.times) for advert in chosen.adverts]
    for name in EVENTS:
        print(f"{name:20}" + "".join(column[name] for column in columns), flush=True)
    return 0


def _measure(advert, times):
    """Run all events at one interval."""
    network = PairNetwork(f"fo{os.getpid()}")
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        pair = Pair(network, Path(folder), Authority("controllers"), advert)
        try:
            for place in PLACES[:2]:
                pair.boot(place)
            pair.web()
            return {name: _row([_once(pair, event) for _ in range(times)]) for name, event in EVENTS.items()}
        finally:
            pair.close()
            network.close()


def _once(pair, event):
    """Run one event; returns the outage in seconds and the number of failed requests."""
    pair.mend()
    pair.push(load_balancer(listener(80), pool("pool", *[member(peer) for peer in pair.peers])))
    pair.calm()
    holder, standby = pair.holder, pair.standby
    with pair.poll() as polling:
        event(pair, holder)
        eventually(standby.holds, "the standby has the VIPs", 10 * pair.advert + 5)
        eventually(pair.serves, "it serves")
    return polling.outage, len(polling.failed)


def _row(found):
    worst = max(found)
    return f"{statistics.median(outage for outage, _ in found) * 1e3:12.0f}{worst[0] * 1e3:8.0f}{worst[1]:8}"


def _hand_over(pair, node):
    partner = next(one for one in pair.nodes if one is not node)
    assert partner.call("POST", "/v2/vrrp/expect", {"seconds": 10})[0] == 200
    assert node.call("POST", "/v2/vrrp/release", {"drain": 5})[0] == 200


if __name__ == "__main__":
    sys.exit(main())
