# SPDX-License-Identifier: Apache-2.0
"""How long an agent takes to bring a change about: from the push to the answer, which says that HAProxy runs it.

    .sandbox/test-venv/bin/python benchmarks/apply_latency.py [--times N] [--sizes 10,1000,10000,10000/50]

For each size (members, or members/pools) a real amphora in namespaces is pushed the whole bundle with one member
added, weighted, disabled, enabled and removed, and with a line that takes a new worker. Nobody visits it, and its
members are not checked: what is measured is the change alone. Needs root and HAProxy.

Wall time is that of the request, its body built before. CPU is of all processes of the amphora while the request lasts,
heartbeats among them: the agent itself, `haproxy -c` (what the agent has waited for), and HAProxy; from ticks of 10 ms
over all repetitions, so it is a mean.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "dataplane"))

from amphora_lab import descendants
from served import Lab, Served
from throwaway_authority import Authority
from under_load import FIRST_PORT, Prepared, QuickMember
from wanted import listener, load_balancer, member, pool

_TICKS = os.sysconf("SC_CLK_TCK")
_STEPS = {"add": (1, False), "weight": (7, False), "disable": (7, True), "enable": (7, False), "remove": None}
_LARGEST_POOL = 40_000


def main():
    """Console entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="repetitions of each change")
    parser.add_argument("--reloads", type=int, default=5, help="repetitions of the reload")
    parser.add_argument("--sizes", default="10,1000,10000,10000/50", help="members, or members/pools")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the namespaces go away then, too
    print(f"{'members':>9} {'pools':>5} {'change':>8} {'n':>3} {'how':>8}", end="")
    print(f" {'p50 ms':>7} {'p90 ms':>7} {'agent':>7} {'-c':>7} {'haproxy':>7}  (CPU ms)")
    with tempfile.TemporaryDirectory(prefix="apl-") as folder:
        lab = Lab(f"ap{os.getpid()}", Path(folder), Authority("controllers"))
        try:
            for size in chosen.sizes.split(","):
                members, _, pools = size.partition("/")
                _measure(lab, int(members), int(pools or 1), chosen)
        finally:
            lab.close()
    return 0


def _measure(lab, members, pools, chosen):
    served = Served(lab)
    prepared = Prepared(served, _tree(members, pools))
    changing = next(reversed(prepared.state))
    prepared.state[changing] = None
    prepared.push()
    prepared.push()
    found = {name: [] for name in (*_STEPS, "reload")}
    spent = {name: [0.0, 0.0, 0.0] for name in found}
    for turn in range(chosen.times):
        for name, state in _STEPS.items():
            prepared.state[changing] = state
            _note(prepared, lab.amphora, found[name], spent[name])
        if turn < chosen.reloads:
            prepared.marks["timeout client 50000ms"] = f"timeout client {50_001 + turn}ms"
            _note(prepared, lab.amphora, found["reload"], spent["reload"])
    for name, answers in found.items():
        _print(members, pools, name, answers, [each / len(answers) * 1000 for each in spent[name]])
    served.close()


def _tree(members, pools):
    each = members // pools
    fronts = [listener(80 + n, pool=f"pool {n}", timeout_client_data=50_000) for n in range(pools)]
    rooms = [pool(f"pool {n}", *(member(_member(n, k)) for k in range(each + (n == pools - 1)))) for n in range(pools)]
    return load_balancer(*fronts, *rooms)


def _member(pool_number, number):
    """Nobody's address: one is never asked for."""
    return QuickMember(f"{pool_number}/{number}", FIRST_PORT + number % _LARGEST_POOL)


def _note(prepared, amphora, answers, spent):
    before = _cpu(amphora)
    answers.append(prepared.push())
    for place, (old, new) in enumerate(zip(before, _cpu(amphora), strict=True)):
        spent[place] += new - old


def _cpu(amphora):
    """Seconds of the agent itself, of what it has waited for, and of HAProxy."""
    agent = waited = haproxy = 0.0
    for pid in descendants(amphora.init()):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(") ")
        except OSError:
            continue
        own, of_children = (sum(map(int, rest.split()[first : first + 2])) / _TICKS for first in (11, 13))
        if "(haproxy" in name:
            haproxy += own + of_children
        else:
            agent += own
            waited += of_children
    return agent, waited, haproxy


def _print(members, pools, name, answers, cpu):
    milliseconds = sorted(each.seconds * 1000 for each in answers)
    p90 = milliseconds[min(len(milliseconds) - 1, int(0.9 * len(milliseconds)))]
    hows = "/".join(sorted({each.how for each in answers}))
    print(f"{members:>9} {pools:>5} {name:>8} {len(answers):>3} {hows:>8}", end="")
    print(
        f" {statistics.median(milliseconds):>7.1f} {p90:>7.1f} " + " ".join(f"{each:>7.1f}" for each in cpu), flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
