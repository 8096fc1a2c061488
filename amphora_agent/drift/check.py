# SPDX-License-Identifier: Apache-2.0
"""Compares the amphora with its confirmed bundle.

Invariant: a check changes nothing, and reads only files that were modified since the last check. A state that ends
without a repair is no difference, for example a daemon that its supervisor is about to restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amphora_agent.apply.applier import Applier
from amphora_agent.apply.components import Components
from amphora_agent.bundle import Bundle
from amphora_agent.drift.report import Difference
from amphora_agent.errors import HaproxyError, MachineError
from amphora_agent.haproxy.config_file import Document
from amphora_agent.paths import file_identity

RELOAD_KINDS = frozenset({"haproxy.cfg", "machine.cfg"})
"""The kinds of differences with which HAProxy may run a configuration that a read-back does not show."""


class DriftChecker:
    """Compares one amphora with its confirmed bundle, and repairs differences."""

    def __init__(self, applier: Applier, parts: Components) -> None:
        self._applier = applier
        self._parts = parts
        self._file = parts.paths.configuration
        # State at the last check that found a correct configuration file: the file's inode number, size and times, and
        # the process id of HAProxy's worker.
        self._intact: tuple[tuple[int, ...] | None, int | None] | None = None
        self._misread = False
        applier.add_change_listener(self.invalidate)

    @property
    def generation(self) -> int | None:
        return self._applier.generation

    def invalidate(self) -> None:
        """Forget the known state, because a change replaces files and processes."""
        self._intact, self._misread = None, False

    def differences(self) -> tuple[Difference, ...] | None:
        """Return the differences from the confirmed bundle. Raises AgentError without an answer.

        Returns None while a change runs or waits, and if this agent has not applied the confirmed bundle yet.
        """
        try:
            return self._applier.run_on_confirmed(self._compare)
        except OSError as error:
            raise MachineError("check for configuration drift", str(error)) from error

    def repair(self, found: Sequence[Difference]) -> None:
        """Apply the confirmed bundle again. Raises AgentError after a failure; the agent retries."""
        self._applier.reapply_confirmed(next((one.sentence for one in found if one.kind in RELOAD_KINDS), ""))

    def _compare(self, bundle: Bundle) -> tuple[Difference, ...]:
        found = [Difference(kind, f"{kind}: {one}") for kind, one in self._parts.plumbing.find_drift(bundle)]
        damaged = self._parts.files.damaged(bundle.files)
        found += [Difference("files", f"{name} is missing or was modified") for name in damaged]
        if bundle.haproxy is not None:
            found += self._haproxy(bundle, bundle.haproxy)
        elif self._file.exists() or self._parts.haproxy.is_wanted():
            found.append(Difference("haproxy", "HAProxy runs, but the bundle has no listener for it"))
        found += [Difference("forwarding", one) for one in self._parts.udp_update.differences(bundle)]
        keepalived = self._parts.keepalived.describe_drift(bundle.vrrp_instance)
        return (*found, *([Difference("keepalived", f"keepalived: {keepalived}")] if keepalived else []))

    def _haproxy(self, bundle: Bundle, text: str) -> Iterator[Difference]:
        haproxy = self._parts.haproxy
        wanted = self._parts.haproxy_update.parse(text)
        directory = self._parts.files.directory(bundle.files)
        if not haproxy.is_machine_configuration_intact():
            yield Difference("machine.cfg", "machine.cfg was modified")
        document = haproxy.compose_document(text, wanted, bundle, directory)
        yield from self._haproxy_file(document)
        if not haproxy.is_wanted():
            yield Difference("haproxy", "HAProxy does not run, and the service manager does not start it")
        elif haproxy.worker_pid() is not None:
            # HAProxy does not answer while it starts or under high load, so the agent reports no drift without an
            # answer.
            try:
                haproxy.verify(wanted, directory)
            except (HaproxyError, OSError) as error:
                if haproxy.worker_pid() is not None:
                    reason = error.happened if isinstance(error, HaproxyError) else "a TLS file is missing"
                    yield Difference("haproxy", f"HAProxy: {reason}")

    def _haproxy_file(self, wanted: Document) -> Iterator[Difference]:
        identity, worker = file_identity(self._file), self._parts.haproxy.worker_pid()
        if self._intact is None or identity is None or self._intact[0] != identity:
            if identity is None or self._file.read_bytes() != wanted.content.encode():
                yield Difference("haproxy.cfg", "haproxy.cfg was modified")
                return
            # haproxy.cfg has changed since the last check, and is correct again. A worker that started since the last
            # check may have read wrong content in between.
            earlier = None if self._intact is None else self._intact[1]
            self._misread = self._misread or (None not in (earlier, worker) and earlier != worker)
        self._intact = identity, worker
        if self._misread:
            yield Difference("haproxy.cfg", "HAProxy has read a modified haproxy.cfg")
