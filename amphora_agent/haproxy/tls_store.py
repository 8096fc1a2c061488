# SPDX-License-Identifier: Apache-2.0
"""What HAProxy holds in its memory of files: asked, changed, and asked again.

Invariant: a change is over only when HAProxy shows what it should hold. Nothing that HAProxy answers is repeated in an
error if it could show a key, and what is sent never is. A transaction of ours is never left open.

HAProxy knows a file by the name that its configuration gives it, not by the directory that was its origin (manual,
"default-path"): so the same names lead to it whatever was read from disk or told since.
Source: management guide, 9.3, "set ssl cert" and those around it.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path

from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.runtime_actions import (
    AddTicketKeys,
    FileStep,
    ForgetFile,
    ListCertificate,
    LoadFile,
    Store,
    UnlistCertificate,
)
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.tls_diff import TICKET_KEYS, Side
from amphora_agent.x509 import crl

_NOUNS: dict[Store, str] = {"cert": "certificate", "ca-file": "CA", "crl-file": "CRL"}
_PRINT = re.compile(r"^SHA1 FingerPrint: ([0-9A-F]{40})$", re.MULTILINE)
_BLOCK = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----.*?-----END [^-]*-----", re.DOTALL)
_SUCCESS = "Success!"


class HeldFiles:
    """The files of one worker.

    Args:
        worker: its socket.
        directory: where the files are that it is to hold.
    """

    def __init__(self, worker: Socket, directory: Path) -> None:
        self._worker = worker
        self._directory = directory
        self._names: dict[Store, set[str]] = {}
        self._loaded: dict[tuple[Store, str], str] = {}
        self._lists: dict[str, tuple[set[str], set[str]]] = {}
        self._whole_lists: dict[str, set[str]] = {}
        self._tickets: list[str] = []

    def change(self, step: FileStep) -> None:
        """Carry out one step.

        Raises:
            HaproxyError: HAProxy did not take it; it holds what it held.
            OSError: the file is not there.
        """
        match step:
            case LoadFile():
                self._load(step.store, step.name)
            case ForgetFile():
                # What is in use elsewhere stays; nobody can see it, and the next worker does not have it.
                self._worker.ask(f"del ssl {step.store} {step.name}")
                self._names.get(step.store, set()).discard(step.name)
            case ListCertificate():
                self._order(f"add ssl crt-list {step.listed} {step.name}", f"list {step.name}")
                self._list(step.listed)[0].add(step.name)
            case UnlistCertificate():
                answer = self._worker.ask(f"del ssl crt-list {step.listed} {step.name}").strip()
                if answer != f"Entry '{step.name}' deleted in crtlist '{step.listed}'!":
                    raise HaproxyError(f"take {step.name} from its list", answer or "HAProxy said nothing")
                self._list(step.listed)[1].add(step.name)
            case AddTicketKeys():
                self._add_keys(step)

    def confirm(self) -> None:
        """Ask HAProxy for everything that was changed.

        Raises:
            HaproxyError: naming the first file of which it holds something else.
        """
        for (store, name), text in self._loaded.items():
            if not self._holds(store, name, text):
                raise HaproxyError(f"confirm {name}", "HAProxy holds another content")
        for listed, (added, gone) in self._lists.items():
            found = self._listed(listed)
            if different := (added - gone - found) | (found & (gone - added)):
                raise HaproxyError(f"confirm {listed}", f"{min(different)} is not as wanted")
        for listed, wanted in self._whole_lists.items():
            if different := self._listed(listed) ^ wanted:
                raise HaproxyError(f"confirm {listed}", f"{min(different)} is not as wanted")
        for name in self._tickets:
            shown = [line.split()[1] for line in self._lines(f"show tls-keys {name}") if len(line.split()) > 1]
            if shown != self._keys(name):
                raise HaproxyError(f"confirm {name}", "HAProxy holds other keys")

    def expect(self, configuration: Configuration) -> None:
        """Have everything confirmed that a configuration needs, whether or not it was changed.

        Raises:
            OSError: a file is not there.
        """
        texts = {name: self._read(name) for name in tls_diff.lists(configuration)}
        self._whole_lists = {name: {entry[0] for entry in tls_diff.entries(text)} for name, text in texts.items()}
        for store, name in tls_diff.held(Side(configuration, texts=texts)):
            self._loaded[store, name] = _payload(self._read(name))
        self._tickets = sorted(tls_diff.ticket_keys(configuration))

    # -- one by one -----------------------------------------------------------------------------------------

    def _load(self, store: Store, name: str) -> None:
        text = _payload(self._read(name))
        if name not in self._known(store):
            self._begin(store, name)
        try:
            self._tell(store, name, text)
            self._order(f"commit ssl {store} {name}", f"commit {name}", f"Committing {name}")
        except HaproxyError:
            self._worker.ask(f"abort ssl {store} {name}")
            raise
        self._loaded[store, name] = text

    def _known(self, store: Store) -> set[str]:
        """The names in one of HAProxy's stores. A transaction that was left open there is ended."""
        if store not in self._names:
            names = set()
            for line in self._lines(f"show ssl {store}"):
                name = line.partition(" - ")[0].strip()
                if name.startswith("*"):
                    self._worker.ask(f"abort ssl {store} {name[1:]}")
                else:
                    names.add(name)
            self._names[store] = names
        return self._names[store]

    def _begin(self, store: Store, name: str) -> None:
        answer = self._worker.ask(f"new ssl {store} {name}").strip()
        if not (answer.startswith("New ") and answer.endswith(f"'{name}'!")):
            raise HaproxyError(f"have HAProxy know of {name}", answer or "it said nothing")
        self._known(store).add(name)

    def _tell(self, store: Store, name: str, text: str) -> None:
        command = f"set ssl {store} {name}"
        answer = self._worker.ask(f"{command} <<\n{text}", shown=command).strip()
        if answer.lower() != f"transaction created for {_NOUNS[store]} {name}!".lower():
            raise HaproxyError(f"have HAProxy read {name}", "it did not take it")

    def _order(self, command: str, what: str, first: str = "") -> None:
        answer = self._worker.ask(command).strip().splitlines()
        began = not first or (bool(answer) and answer[0].rstrip(".") == first)
        if len(answer) != 2 or answer[1] != _SUCCESS or not began:
            raise HaproxyError(f"have HAProxy {what}", "; ".join(answer) or "it said nothing")

    def _list(self, listed: str) -> tuple[set[str], set[str]]:
        return self._lists.setdefault(listed, (set(), set()))

    def _keys(self, name: str) -> list[str]:
        return self._read(name).split()[-TICKET_KEYS:]

    def _add_keys(self, step: AddTicketKeys) -> None:
        for key in self._keys(step.name)[-step.count :]:
            command = f"set ssl tls-key {step.name}"
            answer = self._worker.ask(f"{command} {key}", shown=command).strip()
            if answer != "TLS ticket key updated!":
                raise HaproxyError(f"add a key to {step.name}", "HAProxy did not take it")
        self._tickets.append(step.name)

    # -- what it holds --------------------------------------------------------------------------------------

    def _read(self, name: str) -> str:
        return (self._directory / name).read_text(encoding="utf-8")

    def _listed(self, listed: str) -> set[str]:
        return {line.split()[0] for line in self._lines(f"show ssl crt-list {listed}")}

    def _lines(self, question: str) -> list[str]:
        return [line for line in self._worker.ask(question).splitlines() if line and not line.startswith("#")]

    def _holds(self, store: Store, name: str, text: str) -> bool:
        """Whether HAProxy shows what is in a text: of a certificate the leaf, of a CRL whom it revokes."""
        answer = self._worker.ask(f"show ssl {store} {name}")
        blocks = [found.group(0) for found in _BLOCK.finditer(text)]
        if store == "crl-file":
            revoked = crl.revoked(text)
            return revoked is None or crl.shown(answer) == revoked
        wanted = [_fingerprint(block) for block in blocks]
        shown = _PRINT.findall(answer)
        return shown == wanted[:1] if store == "cert" else set(shown) == set(wanted)


def _payload(text: str) -> str:
    """A file as HAProxy's socket takes it: an empty line would end it."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def _fingerprint(block: str) -> str:
    """As HAProxy shows it; nothing is trusted because of it."""
    block = re.sub(r"(BEGIN|END) (?:X509|TRUSTED) ", r"\1 ", block)
    return hashlib.sha1(ssl.PEM_cert_to_DER_cert(block + "\n"), usedforsecurity=False).hexdigest().upper()
