# SPDX-License-Identifier: Apache-2.0
"""How small and how quick the agent is, measured on one that runs in namespaces of its own.

    .sandbox/test-venv/bin/python benchmarks/agent_footprint.py [--times N] [--install] [--agent-python PATH]

Prints one table:

* from the start of the amphora, and of the agent alone (after kill -9), to the first answer over mutual TLS: seconds
  on the wall, and the processor time that all processes of the amphora have used until then, which is what the wall
  says on a quiet machine;
* for each process of the agent: proportional (PSS), resident (RSS) and private memory. PSS shares a page among those
  who map it, so that the sum is what the amphora pays; RSS counts it for each. HAProxy is not in the sum;
* with --install: what `pip install .[agent]` puts into a fresh environment, with and without compiled files (they are
  counted by their length, and not by the blocks that a file system rounds them up to).
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

import amphora_lab  # noqa: E402 (the laboratory is no package)
from amphora_lab import Amphora, Network, descendants, eventually  # noqa: E402
from configuration_text import listener, text  # noqa: E402
from throwaway_authority import Authority  # noqa: E402

_MIB = 1 << 20
_AGENT = ROOT / ".sandbox" / "agent-venv" / "bin" / "python"
_OF_PIP = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence", "wheel")


def main() -> int:
    """Console entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=7, help="starts to measure")
    parser.add_argument("--agent-python", default=str(_AGENT), help="interpreter of the amphora's environment")
    parser.add_argument("--install", action="store_true", help="measure an installation too (takes a while)")
    chosen = parser.parse_args()
    # The laboratory starts an amphora with the interpreter that it runs in itself.
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
    """Seconds that the supervisor and all that it has started have computed, those that have ended included."""
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
    """By process: proportional, resident and private bytes."""
    init = amphora.init()
    names = {init: "supervisor"}
    for pid in descendants(init):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        kind = next((word for word in ("haproxy", "keepalived") if Path(words[0]).name == word), "")
        if not kind:
            kind = "responder" if any("responder" in word for word in words) else "gunicorn"
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        if kind != "responder":
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
        # A copy: building leaves files beside what is built.
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
