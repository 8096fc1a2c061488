# SPDX-License-Identifier: Apache-2.0
"""The amphora answers exactly the random packets that a model of reassembly predicts.

    AMPHORA_FRAGMENTS_SEED=7 ./run-tests tests/dataplane/test_fragments_random.py

sends other packets. The message of a failure contains the packets and their seed.
"""

from __future__ import annotations

import itertools
import os
import random
from contextlib import closing

import pytest
from fragments import Addresses
from random_fragments import Prediction, Sample, mixed, sample
from restricted import ALLOWED, FORBIDDEN, RST, SYN_ACK, VIP, Link, restrict, serving

pytestmark = pytest.mark.root

SEED = int(os.environ.get("AMPHORA_FRAGMENTS_SEED", "1"))
# The kernel keeps fragments of incomplete packets for up to a minute, and of at most about 4,000 packets in a
# namespace. Above this limit, it drops all fragments.
_PACKETS = 1500
RESTRICTED, OPEN = 80, 81
# Packets in flight at once: the kernel drops fragments after 64 later ones of the same sender.
_TOGETHER = 3
# Packets before one answer that confirms all of them; the kernel's queue can hold their fragments.
_BATCH = 30


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def version(request):
    return request.param


def answers(found: Sample, version: int) -> set[int | None]:
    """Return the TCP flags of the possible answers to a packet; None means no answer."""
    served = found.allowed or found.port == OPEN
    answer = SYN_ACK if served else RST | 0x10
    return {Prediction.WHOLE: {answer}, Prediction.LOST: {None}, Prediction.EITHER: {answer, None}}[
        found.prediction(version)
    ]


@pytest.mark.parametrize("udp", [False, True], ids=["TCP alone", "UDP too"])
@pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(SEED + more, marks=pytest.mark.extended) for more in range(1, 11))]
)
def test_the_rules_apply_to_random_packets(wire, version, udp, seed):
    restrict(wire, version, udp=udp)
    chance, ports = random.Random(seed), itertools.count(10000)
    ends = {allowed: Addresses(each[version], VIP[version]) for allowed, each in ((True, ALLOWED), (False, FORBIDDEN))}
    wrong, seen = [], set()
    with (
        closing(Link(wire, version)) as link,
        serving(wire, version, VIP[version], RESTRICTED),
        serving(wire, version, VIP[version], OPEN),
    ):
        for _ in range(_PACKETS // _BATCH):
            batch = [sample(chance, version, next(ports), (RESTRICTED, RESTRICTED, OPEN)) for _ in range(_BATCH)]
            for begin in range(0, _BATCH, _TOGETHER):
                together = batch[begin : begin + _TOGETHER]
                link.send(mixed(chance, [one.packets(ends[one.allowed]) for one in together]))
            last = Sample(next(ports), allowed=True, port=RESTRICTED)
            link.send(last.packets(ends[True]))
            replies = link.replies(last.number)
            for one in batch:
                expected, found = answers(one, version), replies.get(one.number)
                seen.add((one.prediction(version), one.allowed, one.port, found))
                if found not in expected:
                    wrong.append(f"{one} was answered by {found}, not by one of {expected}")
    assert not wrong, f"seed {seed}, {len(wrong)} of {_PACKETS} packets:\n" + "\n".join(wrong[:5])
    # The sample contains each kind of packet.
    for allowed, port in itertools.product((True, False), (RESTRICTED, OPEN)):
        answer = SYN_ACK if allowed or port == OPEN else RST | 0x10
        assert {(Prediction.WHOLE, allowed, port, answer), (Prediction.LOST, allowed, port, None)} <= seen
