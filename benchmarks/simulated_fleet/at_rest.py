# SPDX-License-Identifier: Apache-2.0
"""Measures a fleet without requests: processes, statements, commands of operators, pages, tables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from typing import Any

from simulated_fleet import processes, shape
from simulated_fleet.deployment import Deployment

# The first heartbeats of all amphorae, and the first rounds of the duties of the controller, are not at rest.
_SETTLE_INTERVALS, _SETTLE_SECONDS = 2.5, 20.0
PROBLEM = re.compile(r" (WARNING|ERROR|CRITICAL) |^Traceback")
# A busy machine delays processes, about which they warn. Errors have another cause.
ERROR = re.compile(r" (ERROR|CRITICAL) |^Traceback")
COMMANDS = (
    ("--version",),
    ("loadbalancer", "list"),
    ("loadbalancer", "list", "--status", "ERROR"),
    ("loadbalancer", "show", "LOAD_BALANCER"),
    ("amphora", "list"),
    ("amphora", "list", "--stale"),
    ("job", "list"),
    ("certificate", "list"),
    ("status", "check"),
)
# The requests to agents whose distribution over time is shown.
SPREAD = {"drift audits": "GET /v2/bundle", "renewals": "PUT /v2/certificate"}
# Part of the title that octavia-driver-agent gives to the processes of a provider agent.
PROVIDER_AGENT = "provider_agent"
PAGES = ("/", "/page.json", "/status.json", "/metrics", "/healthz")


def measure(deployment: Deployment, seconds: float) -> dict[str, Any]:
    """Measure for some seconds, then each command and page."""
    found = measure_processes(deployment, seconds)
    return {
        **found,
        "amphorae": deployment.amphorae,
        "starts": {name: [one.ready_wall, one.ready_cpu] for name, one in deployment.programs.items()},
        "commands": measure_commands(deployment),
        "pages": measure_pages(deployment),
        "tables": measure_tables(deployment),
        "warnings": find_warnings(deployment),
    }


def settle(deployment: Deployment) -> None:
    """Wait until the first heartbeats and the first rounds of all duties are over."""
    time.sleep(max(_SETTLE_SECONDS, _SETTLE_INTERVALS * deployment.options.interval))


def find_warnings(deployment: Deployment, problem: re.Pattern[str] = PROBLEM) -> dict[str, list[str]]:
    """Return the warnings and errors in the logs of the control plane. At rest there are none."""
    found = {}
    for name, program in deployment.programs.items():
        lines = program.log.read_text(encoding="utf-8", errors="replace").splitlines()
        found[name] = [line[:300] for line in lines if problem.search(line)]
    return {name: [f"{len(lines)} lines", *lines[:5]] for name, lines in found.items() if lines}


def measure_processes(deployment: Deployment, seconds: float) -> dict[str, Any]:
    """Return the load of each process: parts of a processor, MiB, statements and rows of the database per second."""
    counters = processes.DatabaseCounters(*deployment.counters_urls)
    before, statements, rows = read_cpu(deployment), counters.read(), counters.rows_read()
    begun = time.monotonic()
    work = deployment.command(do="counts")
    spread = watch_agents(deployment, seconds)
    passed = time.monotonic() - begun
    used = {name: (now - before[name]) / passed for name, now in read_cpu(deployment).items()}
    after = {name: (now - statements.get(name, 0.0)) / passed for name, now in counters.read().items()}
    read = {name: (now - rows.get(name, 0.0)) / passed for name, now in counters.rows_read().items()}
    counters.dispose()
    now = deployment.command(do="counts")
    return {
        "load_average": processes.load_average(),
        "seconds": passed,
        "cpu": used,
        "memory": read_memory(deployment),
        "statements": after,
        "rows": read,
        "agents": {name: (now[name] - work.get(name, 0)) / passed for name in now},
        "spread": spread,
    }


def watch_agents(deployment: Deployment, seconds: float) -> dict[str, list[int]]:
    """Return the numbers of drift audits and of renewed certificates in each second."""
    before, begun = deployment.command(do="counts"), time.monotonic()
    found: dict[str, list[int]] = {name: [] for name in SPREAD}
    for second in range(1, round(seconds) + 1):
        time.sleep(max(0.0, begun + second - time.monotonic()))
        now = deployment.command(do="counts")
        for name, request in SPREAD.items():
            found[name].append(now.get(request, 0) - before.get(request, 0))
        before = now
    return found


def read_cpu(deployment: Deployment, *, database: bool = True) -> dict[str, float]:
    """Return the processor time of each process so far, in seconds."""
    found = {name: processes.cpu_seconds(pids) for name, pids in _group_processes(deployment).items()}
    if database:
        found |= {name: processes.cpu_seconds(pids) for name, pids in deployment.server_pids().items()}
    return found


def read_memory(deployment: Deployment, *, database: bool = True) -> dict[str, float]:
    """Return the proportional memory of each process with its children, in MiB."""
    found = {name: processes.memory_mib(pids) for name, pids in _group_processes(deployment).items()}
    if database:
        found |= {name: processes.memory_mib(pids) for name, pids in deployment.server_pids().items()}
    return found


def _group_processes(deployment: Deployment) -> dict[str, list[int]]:
    """Return the ids of the processes of each program.

    `reporter` has the processes of the provider agent, and `octavia` the others of octavia-driver-agent.
    """
    found = {name: one.pids() for name, one in deployment.programs.items()}
    everyone = found.get("reporter", [])
    own = [pid for pid in everyone if PROVIDER_AGENT in processes.title(pid)]
    return {**found, "reporter": own, "octavia": [pid for pid in everyone if pid not in own]} if own else found


def measure_commands(deployment: Deployment, commands: tuple[tuple[str, ...], ...] = COMMANDS) -> dict[str, Any]:
    """Return the seconds, the processor time and the bytes of output of each command."""
    names = {"LOAD_BALANCER": shape.identifier("lb", 0), "AMPHORA": shape.identifier("amphora", 0, 0)}
    return {" ".join(words): run_command(deployment, *(names.get(one, one) for one in words)) for words in commands}


def run_command(deployment: Deployment, *words: str) -> dict[str, float]:
    """Run one command of amphoractl in a process of its own."""
    begun = time.monotonic()
    argv = [sys.executable, "-m", "amphora_driver.cli.main", *words]
    environment = deployment.environment(deployment.configuration)
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as popen:
        output = popen.stdout.read()  # type: ignore[union-attr]
        _, status, used = os.wait4(popen.pid, 0)
        popen.returncode = os.waitstatus_to_exitcode(status)
    seconds, cpu = time.monotonic() - begun, used.ru_utime + used.ru_stime
    return {
        "seconds": seconds,
        "cpu": cpu,
        "bytes": len(output),
        "lines": output.count(b"\n"),
        "status": popen.returncode,
        "memory": used.ru_maxrss / 1024,
    }


def measure_pages(deployment: Deployment) -> dict[str, Any]:
    """Return the seconds and the bytes of each page of the controller, and the processor time of the controller."""
    program = deployment.programs["controller0"]
    found = {}
    for path in PAGES:
        # The status page reads the database at most once a second.
        time.sleep(1.2)
        before, begun = processes.cpu_seconds(program.pids()), time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{program.port}{path}", timeout=60) as answer:
            size = len(answer.read())
        seconds = time.monotonic() - begun
        found[path] = {"seconds": seconds, "cpu": processes.cpu_seconds(program.pids()) - before, "bytes": size}
    return found


def measure_tables(deployment: Deployment) -> dict[str, Any]:
    counters = processes.DatabaseCounters(*deployment.counters_urls)
    try:
        return {name: list(values) for name, values in counters.tables().items()}
    finally:
        counters.dispose()
