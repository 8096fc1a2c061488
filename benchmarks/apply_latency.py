# SPDX-License-Identifier: Apache-2.0
"""How long an agent takes to bring a change about: from the push to the answer, which says that HAProxy runs it.

    .sandbox/test-venv/bin/python benchmarks/apply_latency.py [--times N] [--sizes 10,1000,10000,10000/50]

For each size (members, or members/pools) a real amphora in namespaces is pushed the whole bundle with one member
added, weighted, disabled, enabled and removed, and with a line that takes a new worker. Nobody visits it, and its
members are not checked: what is measured is the change alone. Needs root and HAProxy.

"live" is when the running HAProxy has the change: from then on it says so if asked for that server's weight (each
millisecond; of 10,000 HAProxy 2.6 takes 2 ms to find it). "answer" is when the agent has also seen that HAProxy would
start with it, asked what came of it, and confirmed it on disk. Wall time is from the first byte of the request, its
body built before; the best one says most about the agent on a machine with other work. CPU is of all processes of the
amphora while the request lasts, heartbeats among them: the agent itself, `haproxy -c` (what the agent has waited
for), and HAProxy; from ticks of 10 ms over all repetitions, so it is a mean.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
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
    print(f" {'live: best':>10} {'p50 ms':>7} {'answer: best':>12} {'p50':>7} {'p90':>7}", end="")
    print(f" {'agent':>7} {'-c':>7} {'haproxy':>7}  (CPU ms)")
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
            _note(prepared, lab.amphora, found[name], spent[name], _expected(changing, name, prepared))
        if turn < chosen.reloads:
            prepared.marks["timeout client 50000ms"] = f"timeout client {50_001 + turn}ms"
            _note(prepared, lab.amphora, found["reload"], spent["reload"])
    for name, answers in found.items():
        if not answers:
            continue
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


def _expected(member_id, step, prepared):
    """What to ask HAProxy, and what it says as soon as the step is live; None where it says nothing of the kind."""
    if step not in ("add", "weight", "remove"):
        return None
    line = next(n for n, each in enumerate(prepared.text_lines) if member_id in each.split()[1:2])
    backend = next(each.split()[1] for each in reversed(prepared.text_lines[:line]) if each.startswith("backend "))
    return f"get weight {backend}/{member_id}", {"add": "1 (", "weight": "7 (", "remove": "No such"}[step]


def _note(prepared, amphora, answers, spent, expected=None):
    body = prepared.body()
    before = _cpu(amphora)
    with ThreadPoolExecutor(1) as thread:
        begun = time.monotonic()
        seen = thread.submit(_until, amphora, *expected) if expected is not None else None
        answered = prepared.push(body)
    live = seen.result() - begun if seen is not None else None
    answers.append((answered, live))
    for place, (old, new) in enumerate(zip(before, _cpu(amphora), strict=True)):
        spent[place] += new - old


def _until(amphora, question, answer):
    """When HAProxy answers like this."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = amphora.ask_haproxy(question)
        if now.startswith(answer):
            break
        time.sleep(0.001)
    return time.monotonic()


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
    milliseconds = sorted(each.seconds * 1000 for each, _ in answers)
    live = sorted(each * 1000 for _, each in answers if each is not None)
    p90 = milliseconds[min(len(milliseconds) - 1, int(0.9 * len(milliseconds)))]
    hows = "/".join(sorted({each.how for each, _ in answers}))
    print(f"{members:>9} {pools:>5} {name:>8} {len(answers):>3} {hows:>8}", end="")
    print(f" {live[0]:>10.1f} {statistics.median(live):>7.1f}" if live else f" {'':>10} {'':>7}", end="")
    print(f" {milliseconds[0]:>12.1f} {statistics.median(milliseconds):>7.1f} {p90:>7.1f} ", end="")
    print(" ".join(f"{each:>7.1f}" for each in cpu), flush=True)


if __name__ == "__main__":
    sys.exit(main())
