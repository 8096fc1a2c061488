# SPDX-License-Identifier: Apache-2.0
"""Measures the start time, memory and disk usage of an agent in namespaces.

    .sandbox/test-venv/bin/python benchmarks/agent_footprint.py [--times N] [--install] [--agent-python PATH]

Prints one table:

* from the start of the amphora, or of the agent alone (after kill -9), to the first response over mutual TLS: wall
  time in seconds, and the processor time of all processes of the amphora. Both are equal on an idle machine;
* for each process of the agent: proportional (PSS), resident (RSS) and private memory. PSS divides a page among the
  processes that map it, so that the sum is the memory of the amphora; RSS counts it for each. HAProxy is not included;
* with --install: the size of a new environment after `pip install .[agent]`, with and without compiled files (length of
  the files, not allocated blocks).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "dataplane"), str(ROOT / "tests")]

import amphora_lab  # noqa: E402 (tests/dataplane is not a package)
from amphora_lab import Amphora, Network, descendants, eventually  # noqa: E402
from configuration_text import listener, text  # noqa: E402
from throwaway_authority import Authority  # noqa: E402

_MIB = 1 << 20
_AGENT = ROOT / ".sandbox" / "agent-venv" / "bin" / "python"
_OF_PIP = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence", "wheel")


def main() -> int:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=7, help="number of starts")
    parser.add_argument("--agent-python", default=str(_AGENT), help="Python interpreter of the agent")
    parser.add_argument("--install", action="store_true", help="also measure an installation (takes some minutes)")
    chosen = parser.parse_args()
    # amphora_lab starts an amphora with the current interpreter.
    amphora_lab.sys = SimpleNamespace(executable=chosen.agent_python)
    network = Network(f"af{os.getpid()}")
    try:
        _measure(network, chosen.times)
    finally:
        network.close()
    if chosen.install:
        _installation()
    return 0


def _measure(network: Network, times: int) -> None:
    cold, warm, spent, memory = [], [], [], {}
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="af-") as folder:
            network.plug()
            amphora = Amphora(network, Path(folder), Authority("controllers"))
            try:
                cold.append(_until_it_answers(amphora, amphora.start))
                spent.append(_processor_time(amphora))
                warm.append(_until_it_answers(amphora, lambda amphora=amphora: _restart(amphora)))
                assert amphora.push(1, text(listener(["m1"])))[0] == 200
                amphora.call("GET", "/v2/diagnostics")
                memory = _memory(amphora)
            finally:
                amphora.power_off()
                network.unplug()
    print(f"{'start to first answer, s':44}{'median':>9}{'worst':>9}")
    for name, seconds in (("amphora", cold), ("amphora, processor time", spent), ("agent alone", warm)):
        print(f"  {name:42}{statistics.median(seconds):9.2f}{max(seconds):9.2f}")
    print(f"{'memory, MiB':44}{'PSS':>9}{'RSS':>9}{'private':>9}")
    ours = [sizes for name, sizes in memory.items() if name.split()[0] not in ("haproxy", "keepalived")]
    rows = {**memory, "the agent's, together": tuple(map(sum, zip(*ours, strict=True)))}
    for name, sizes in rows.items():
        print(f"  {name:42}" + "".join(f"{size / _MIB:9.1f}" for size in sizes))


def _until_it_answers(amphora: Amphora, begin) -> float:
    began = time.perf_counter()
    begin()
    eventually(amphora.answers, "the agent answers", 30)
    return time.perf_counter() - began


def _processor_time(amphora: Amphora) -> float:
    """The processor time of the supervisor and all its descendants, including ended ones, in seconds."""
    init = amphora.init()
    ticks = 0
    for pid in (init, *descendants(init)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _restart(amphora: Amphora) -> None:
    before = amphora.status("amphora-agent")
    amphora.supervisor(op="signal", name="amphora-agent", signal=9)
    eventually(lambda: amphora.status("amphora-agent")["starts"] > before["starts"], "the agent starts again")


def _memory(amphora: Amphora) -> dict[str, tuple[int, int, int]]:
    """PSS, RSS and private memory in bytes by process."""
    init = amphora.init()
    names = {init: "supervisor"}
    for pid in descendants(init):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        kind = next((word for word in ("haproxy", "keepalived") if Path(words[0]).name == word), "")
        if not kind:
            kind = "responder" if any("responder" in word for word in words) else "agent"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        if kind not in ("responder", "agent"):
            kind += " worker" if names.get(parent, "").startswith(kind) else " master"
        names[pid] = kind
    return {name: _sizes(pid) for pid, name in names.items()}


def _sizes(pid: int) -> tuple[int, int, int]:
    words = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            words[name] = int(rest.split()[0]) * 1024
    return words["Pss"], words["Rss"], words["Private_Clean"] + words["Private_Dirty"]


def _installation() -> None:
    with tempfile.TemporaryDirectory(prefix="af-") as folder:
        place = Path(folder)
        # Build a copy, because a build leaves files beside the sources.
        source = place / "source"
        source.mkdir()
        for name in ("amphora_agent", "amphora_driver"):
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
        subprocess.run([place / "venv/bin/python", "-m", "pip", "install", "-qq", f"{source}[agent]"], check=True)
        found = next((place / "venv/lib").glob("python3*/site-packages"))
        sizes: dict[str, tuple[int, int]] = {}
        for file in found.rglob("*"):
            top = file.relative_to(found).parts[0].partition("-")[0].removesuffix(".pth")
            if file.is_file() and top not in _OF_PIP:
                compiled, sources = sizes.get(top, (0, 0))
                size = file.stat().st_size
                is_compiled = "__pycache__" in file.parts
                sizes[top] = (compiled + size * is_compiled, sources + size * (not is_compiled))
        print(f"{'installation, MiB':44}{'all':>9}{'compiled':>9}")
        for name, (compiled, sources) in sorted(sizes.items(), key=lambda item: -sum(item[1])):
            print(f"  {name:42}{(compiled + sources) / _MIB:9.2f}{compiled / _MIB:9.2f}")
        compiled, sources = (sum(part) for part in zip(*sizes.values(), strict=True))
        print(f"  {'together':42}{(compiled + sources) / _MIB:9.2f}{compiled / _MIB:9.2f}")


if __name__ == "__main__":
    sys.exit(main())
