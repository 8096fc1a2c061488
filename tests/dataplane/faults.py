# SPDX-License-Identifier: Apache-2.0
"""Failures of an amphora: a kill at a failpoint, a full disk, concurrent pushes.

Invariant: every function returns when its effect is visible from outside.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

from amphora_lab import VIP, alive, descendants, eventually, get

from amphora_agent.failpoints import Point
from amphora_agent.network.namespace import Namespace


def agents(amphora) -> list[int]:
    """The agent's processes."""
    agent = amphora.agent_pid()
    return [agent, *descendants(agent)]


def end_agent(amphora, number=signal.SIGKILL) -> None:
    """Kill all processes of the agent, and wait for its restart."""
    victims = agents(amphora)
    for victim in victims if number == signal.SIGKILL else victims[:1]:
        with suppress(ProcessLookupError):
            os.kill(victim, number)
    eventually(lambda: not any(alive(pid) for pid in victims), "the agent has ended")
    eventually(amphora.answers, "the restarted agent answers")


def haproxy_pids(amphora) -> tuple[int, int]:
    """Return the host PIDs of HAProxy's master and current worker."""
    master = amphora.status("haproxy")["pid"]
    worker = int(amphora.ask_haproxy("show info").partition("\nPid: ")[2].split()[0])
    return amphora.outside_pid(master), amphora.outside_pid(worker)


def arm(amphora, point: Point, what: str = "die") -> Path:
    file = amphora.points / point.value
    temporary = amphora.points / "new"
    temporary.write_text(what)
    return temporary.rename(file)


def push_quietly(amphora, *args, **kwargs):
    """Push once to an agent that may be killed; return the answer, or None."""
    with suppress(OSError, http.client.HTTPException), apart(amphora) as push:
        return push(amphora.bundle(*args, **kwargs)).result(60)
    return None


def _exchange(amphora, bundle):
    connection = amphora.connection(amphora.tls(amphora.client_certificate))
    try:
        connection.request("PUT", "/v2/bundle", json.dumps(bundle).encode())
        with connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextmanager
def apart(amphora):
    """Yield a function that pushes a bundle over a separate connection and returns a future."""
    place = Path("/run/netns") / amphora.network.name("ctl")
    threads: list[Namespace] = []

    def push(bundle):
        threads.append(Namespace(place))
        return threads[-1]._thread.submit(_exchange, amphora, bundle)

    try:
        yield push
    finally:
        for thread in threads:
            thread.close()


@contextmanager
def held_at(amphora, point: Point, wanted):
    """Suspend a push at a failpoint during the block; yield a future of its answer."""
    armed = arm(amphora, point, "wait")
    with apart(amphora) as push:
        answer = push(wanted)
        try:
            eventually(armed.with_suffix(".here").exists, f"the change is at {point.value}")
            yield answer
        finally:
            armed.unlink(missing_ok=True)
            answer.exception(60)


@contextmanager
def small_disk(amphora, kilobytes: int):
    """Mount a small disk for the amphora's persistent files, before the amphora starts."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "tmpfs", amphora.var],
        check=True,
    )
    try:
        yield
    finally:
        amphora.power_off()
        subprocess.run(["umount", "--lazy", amphora.var], check=True)


def fill(amphora) -> Path:
    """Fill the disk; return the file."""
    file = amphora.var / "filler"
    with file.open("ab", buffering=0) as opened, suppress(OSError):
        for size in (65536, 4096, 512, 1):
            with suppress(OSError):
                while True:
                    opened.write(b"\0" * size)
    return file


def answered(amphora, port: int = 80, address: str = VIP) -> str | None:
    """Return the name of the answering member, or None."""
    with suppress(OSError, http.client.HTTPException):
        status, said = amphora.network.thread("cl").run(get, address, port, "/", 2.0)
        return said if status == 200 else None
    return None
