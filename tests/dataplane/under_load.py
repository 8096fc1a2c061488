# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests under load: a prepared bundle, traffic, and the memory of HAProxy's processes.

Invariant: a push needs almost no processor time of the test. The test renders the load balancer once, with
all members; each push changes one line of the configuration or one file.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from amphora_lab import children, eventually
from peers import MEMBER
from program import Program
from wanted import id_of

from amphora_driver.render.haproxy import render

FIRST_PORT = 21_000
HERE = Path(__file__).parent


@dataclass(frozen=True)
class QuickMember:
    """One port of `quick_members`; for `wanted.member`."""

    name: str
    port: int
    address: str = MEMBER

    @property
    def id(self) -> str:
        return id_of("member", self.name)


def quick_members(prefix: str, count: int, first: int) -> tuple[QuickMember, ...]:
    return tuple(QuickMember(f"{prefix}{n}", FIRST_PORT + first + n) for n in range(count))


@dataclass(frozen=True)
class Answered:
    """The agent's answer to a push, and its time (monotonic clock of the machine)."""

    how: str
    reason: str
    at: float
    seconds: float


class Prepared:
    """A load balancer whose members and certificates change between pushes.

    Attributes:
        state: by member id, the weight and whether the member is disabled; None for an absent member.
        answers: the number of pushes by the agent's `how`.
    """

    def __init__(self, served, tree, secrets: dict[str, str] | None = None, **limits: int) -> None:
        rendered = render(tree)
        assert not rendered.refused
        self._served = served
        self._document = json.loads(served._bundle(tree, rendered, secrets or {}))
        self._document["limits"].update(limits)
        self._secrets = {file.name: file.secret.ref for file in rendered.files if file.secret is not None}
        self._lines = rendered.text.split("\n")
        self.state: dict[str, tuple[int, bool] | None] = {
            member.id: (member.weight, False) for pool in tree.pools for member in pool.members
        }
        self.marks: dict[str, str] = {}
        self.answers: Counter[str] = Counter()
        self.reasons: list[str] = []

    def certificate(self, ref: str, pem: str) -> None:
        """Replace a secret from the next push on."""
        for file in self._document["files"]:
            if self._secrets.get(file["name"]) == ref:
                file["content"] = pem

    @property
    def text_lines(self) -> list[str]:
        """Return the lines of the configuration with all members."""
        return self._lines

    def push(self, body: bytes | None = None) -> Answered:
        """Push the wanted state.

        Args:
            body: an earlier result of `body`, to push instead.

        Returns:
            The agent's answer; a refusal fails the test.
        """
        body = self.body() if body is None else body
        begun = time.monotonic()
        status, answer = self._served.amphora.call("PUT", "/v2/bundle", body)
        now = time.monotonic()
        assert status == 200, answer
        self.answers[answer["how"]] += 1
        self.reasons.append(answer["reason"])
        return Answered(answer["how"], answer["reason"], now, now - begun)

    def refused(self) -> dict:
        """Push the wanted state, expect HAProxy to refuse it, and return the error."""
        status, answer = self._served.amphora.call("PUT", "/v2/bundle", self.body())
        assert status == 422, answer
        return {**answer, **answer["error"]}

    def body(self) -> bytes:
        """Return the body of a push of the wanted state."""
        self._document["generation"] = next(self._served.lab.generations)
        self._document["haproxy"] = self.text()
        return json.dumps(self._document).encode()

    def text(self) -> str:
        """Return the configuration; `marks` replaces words, for changes that need a new worker."""
        lines = []
        for line in self._lines:
            words = line.split()
            if words[:1] == ["server"]:
                wanted = self.state[words[1]]
                if wanted is None:
                    continue
                changed = re.sub(r" weight \d+", f" weight {wanted[0]}", line)
                lines.append(f"{changed} disabled" if wanted[1] else changed)
            else:
                lines.append(line)
        text = "\n".join(lines)
        for old, new in self.marks.items():
            assert old in text, f"the configuration has no {old!r}"
            text = text.replace(old, new)
        return text


class Traffic:
    """The programs of members and of clients, for one test."""

    def __init__(self, served) -> None:
        network = served.lab.network
        self.members = Program(network.name("mem"), HERE / "quick_members.py")
        self.clients = Program(network.name("cl"), HERE / "load.py")

    def listen(self, members: Iterable[QuickMember]) -> None:
        for each in members:
            self.members.ask("listen", address=each.address, ports=[each.port])

    def start(self, name: str, kind: str, count: int, **more) -> None:
        """Start clients of a kind (see `load`); further calls with a name add clients."""
        self.clients.ask("start", name=name, kind=kind, count=count, **more)

    def report(self) -> dict[str, dict]:
        return self.clients.ask("report")

    def stop(self, *names: str) -> dict[str, dict]:
        return self.clients.ask("stop", names=list(names))

    def finish_downloads(self) -> int:
        return self.members.ask("finish")

    def until_alive(self, name: str, count: int) -> None:
        eventually(lambda: self.report()[name]["alive"] == count, f"{count} of {name} are alive")

    def goes_on(self, *names: str, requests: int = 3) -> None:
        """Wait for further answers of each of these kinds."""
        before = self.report()
        eventually(
            lambda: all(self.report()[name]["requests"] >= before[name]["requests"] + requests for name in names),
            f"answers of {', '.join(names)}",
        )

    def heard(self, member: QuickMember) -> list[tuple[float, float]]:
        """Return the times at which requests to a member were sent and received."""
        return self.members.ask("heard", port=member.port)

    def close(self) -> None:
        self.clients.close()
        self.members.close()


def assert_nothing_failed(report: dict[str, dict], doing: str) -> None:
    """Assert that no request failed, was repeated, or lost its connection without notice."""
    wrong = {
        name: {key: counts[key] for key in ("failures", "resets", "cuts", "retried", "idle_closes", "reasons")}
        for name, counts in report.items()
        if any(counts[key] for key in ("failures", "resets", "cuts", "retried", "idle_closes"))
    }
    assert not wrong, f"{doing}: {json.dumps(wrong, indent=1)}"


class Processes:
    """HAProxy's processes on the host: the number of workers, and their memory."""

    def __init__(self, amphora) -> None:
        self._amphora = amphora
        self.master = amphora.outside_pid(amphora.status("haproxy")["pid"])
        self.most = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @property
    def workers(self) -> list[int]:
        """Return the running workers, including the present one."""
        return [pid for pid in children(self.master) if _is_haproxy(pid)]

    def resident(self) -> int:
        """Return the resident kilobytes of all processes; a shared page counts once per process."""
        return sum(_resident(pid) for pid in (self.master, *self.workers))

    def settled(self) -> int:
        """Wait for the end of replaced workers, and return the resident kilobytes."""
        eventually(lambda: len(self.workers) == 1, "the old workers have ended", 30)
        return self.resident()

    def _watch(self) -> None:
        # No event reports the number of workers. A worker lives for at least a reload, which takes longer than 20 ms.
        while not self._ending.wait(0.02):
            self.most = max(self.most, len(self.workers))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ending.set()
        self._thread.join()


def _is_haproxy(pid: int) -> bool:
    """Return whether a process is a worker, and neither a zombie nor a process before execve(2)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def _resident(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
