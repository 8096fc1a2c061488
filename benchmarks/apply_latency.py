# SPDX-License-Identifier: Apache-2.0
"""Measures the time of a change in an agent: from the push to the confirmation that HAProxy has it.

    .sandbox/test-venv/bin/python benchmarks/apply_latency.py [--times N] [--sizes 10,1000,10000,10000/50]

For each size (members, or members/pools), a real amphora in namespaces gets complete bundles: with one member added,
with another weight, disabled, enabled and removed, and with a line that requires a reload. There is no client traffic,
and members have no health checks: the result is the time of the change alone. Needs root and HAProxy.

"live" is the time until the running HAProxy has the change. The benchmark polls the weight of the server every
millisecond (HAProxy 2.6 needs 2 ms to find one of 10,000). "answer" is the time until the agent has also checked the
file with `haproxy -c`, read back the result, and confirmed it on disk. Wall time starts with the first byte of the
request; its body is prepared before. On a busy machine, the best value is the most meaningful one. CPU time includes
all processes of the amphora during the request, also heartbeats: the agent itself, `haproxy -c` (child processes of the
agent), and HAProxy. It is a mean over all repetitions, measured in ticks of 10 ms.
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
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="repetitions of each change")
    parser.add_argument("--reloads", type=int, default=5, help="repetitions of the reload")
    parser.add_argument("--sizes", default="10,1000,10000,10000/50", help="members, or members/pools")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cleanup of the namespaces runs
    print(f"{'members':>9} {'pools':>5} {'change':>8} {'n':>3} {'how':>8}", end="")
    print(f" {'live: best':>10} {'p50 ms':>7} {'answer: best':>12} {'p50':>7} {'p90':>7}", end="")
    print(f" {'agent':>7} {'-c':>7} {'haproxy':>7}  (CPU ms)")
    with tempfile.TemporaryDirectory(prefix="apl-") as folder:
        lab = Lab(f"ap{os.getpid()}", Path(folder), Authority("controllers"), failpoints=False)
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
    """The unused address of a member without health checks."""
    return QuickMember(f"{pool_number}/{number}", FIRST_PORT + number % _LARGEST_POOL)


def _expected(member_id, step, prepared):
    """The HAProxy command that shows the step, and its output when the step is live; None if none does."""
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
    """Wait until HAProxy gives this output; returns the time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = amphora.ask_haproxy(question)
        if now.startswith(answer):
            break
        time.sleep(0.001)
    return time.monotonic()


def _cpu(amphora):
    """CPU seconds of the agent, of its ended children, and of HAProxy."""
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
