# SPDX-License-Identifier: Apache-2.0
"""The machine beside the bundle it has confirmed.

Invariant: a look changes nothing and takes a few milliseconds: what nobody has touched since it was looked at last is
not read again. What mends itself (a daemon that its parent is about to start again, one that is busy) is no difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from amphora_agent.apply.file_sets import FileSets, looks_of
from amphora_agent.apply.haproxy_update import Serving
from amphora_agent.apply.udp_update import VirtualServing
from amphora_agent.bundle import Bundle
from amphora_agent.drift.report import Difference
from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.process import Haproxy
from amphora_agent.keepalived.process import Keepalived
from amphora_agent.network.plumbing import Plumbing
from amphora_agent.paths import Paths

FILE_WORDS = frozenset({"haproxy.cfg", "machine.cfg"})
"""With these HAProxy may run something that nobody has confirmed, whatever it can be asked for."""


class Eye:
    """Looks at one machine. Used by whoever has the turn to change it."""

    def __init__(
        self,
        paths: Paths,
        haproxy: Haproxy,
        keepalived: Keepalived,
        plumbing: Plumbing,
        files: FileSets,
        own: Serving,
        virtual: VirtualServing,
    ) -> None:
        self._paths = paths
        self._haproxy = haproxy
        self._keepalived = keepalived
        self._plumbing = plumbing
        self._files = files
        self._serving = own
        self._virtual = virtual
        # How HAProxy's file looked when it was right, and who served then; None since the last change.
        self._right: tuple[tuple[int, ...] | None, int | None] | None = None
        self._misread = False

    def forget(self) -> None:
        """A change was made: what is there now is another machine's worth of files and processes."""
        self._right, self._misread = None, False

    def look(self, bundle: Bundle) -> tuple[Difference, ...]:
        """What is not as in a bundle that is confirmed.

        Raises:
            AgentError: it cannot be found out.
        """
        found = [*self._network(bundle), *self._secrets(bundle)]
        if bundle.haproxy is not None:
            found += self._haproxy_runs(bundle, bundle.haproxy)
        elif self._paths.configuration.exists() or self._haproxy.is_wanted():
            found.append(Difference("haproxy", "there is a HAProxy, and none is wanted"))
        found += [Difference("forwarding", one) for one in self._virtual.differences(bundle)]
        amiss = self._keepalived.describe_drift(bundle.vrrp_instance)
        return (*found, *([Difference("keepalived", f"keepalived: {amiss}")] if amiss else []))

    def _network(self, bundle: Bundle) -> Iterator[Difference]:
        for word, sentence in self._plumbing.find_drift(bundle):
            yield Difference(word, f"{word}: {sentence}")

    def _secrets(self, bundle: Bundle) -> Iterator[Difference]:
        for name in self._files.damaged(bundle.files):
            yield Difference("files", f"{name} is not what was sent")

    def _haproxy_runs(self, bundle: Bundle, text: str) -> Iterator[Difference]:
        wanted = self._serving.parsed(text)
        directory = self._files.place(bundle.files)
        if not self._haproxy.is_machine_configuration_ours():
            yield Difference("machine.cfg", "machine.cfg is not as it was written")
        document = self._haproxy.document(text, wanted, bundle.files, directory, bundle.limits, bundle.vrrp)
        yield from self._file(document)
        if not self._haproxy.is_wanted():
            yield Difference("haproxy", "HAProxy does not run, and nobody starts it")
        elif self._haproxy.worker_pid() is not None:  # otherwise it is being started, or busy
            try:
                self._haproxy.verify(wanted, directory)
            except (HaproxyError, OSError) as error:
                if self._haproxy.worker_pid() is not None:
                    said = error.happened if isinstance(error, HaproxyError) else "a file is gone that it should hold"
                    yield Difference("haproxy", f"HAProxy: {said}")

    def _file(self, wanted: Document) -> Iterator[Difference]:
        looks, worker = looks_of(self._paths.configuration), self._haproxy.worker_pid()
        if self._right is None or looks is None or self._right[0] != looks:
            if looks is None or _digest(self._paths.configuration.read_bytes()) != _digest(wanted.content.encode()):
                yield Difference("haproxy.cfg", "haproxy.cfg is not as it was written")
                return
            # It was touched and is right again: who began to serve meanwhile may have read something else.
            others = None if self._right is None else self._right[1]
            self._misread = self._misread or (None not in (others, worker) and others != worker)
        self._right = looks, worker
        if self._misread:
            yield Difference("haproxy.cfg", "HAProxy has read haproxy.cfg while somebody else's words were in it")


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
