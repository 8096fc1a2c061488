# SPDX-License-Identifier: Apache-2.0
"""Changes the TLS files in HAProxy's memory over the stats socket, and reads them back.

Invariant: a change is complete only when HAProxy reports the new content. No error shows a content that was sent. No
transaction stays open. HAProxy knows a file by its name in the configuration (manual, "default-path"). Source:
management guide, 9.3, "set ssl cert" and the commands after it.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path

from amphora_agent import x509
from amphora_agent.errors import HaproxyError
from amphora_agent.haproxy import runtime_actions as act
from amphora_agent.haproxy import tls_diff
from amphora_agent.haproxy.config_parser import Configuration
from amphora_agent.haproxy.runtime_actions import Store
from amphora_agent.haproxy.runtime_socket import Socket
from amphora_agent.haproxy.tls_diff import TICKET_KEYS, TlsState

_NOUNS: dict[Store, str] = {"cert": "certificate", "ca-file": "CA", "crl-file": "CRL"}
_PRINT = re.compile(r"^SHA1 FingerPrint: ([0-9A-F]{40})$", re.MULTILINE)
_BLOCK = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----.*?-----END [^-]*-----", re.DOTALL)
_SUCCESS = "Success!"


class TlsStore:
    """The TLS files of one worker; the contents come from files in a directory."""

    def __init__(self, worker: Socket, directory: Path) -> None:
        self._worker = worker
        self._directory = directory
        self._names: dict[Store, set[str]] = {}
        self._expected: dict[tuple[Store, str], str] = {}
        self._lists: dict[str, tuple[set[str], set[str]]] = {}
        self._whole_lists: dict[str, set[str]] = {}
        self._tickets: list[str] = []

    def run(self, action: act.FileAction) -> None:
        """Carry out one action.

        Raises:
            HaproxyError: HAProxy refused the action and keeps the former content.
            OSError: the file is missing.
        """
        match action:
            case act.LoadFile():
                self._load(action.store, action.name)
            case act.UnloadFile():
                # HAProxy refuses to unload a file in use. The refusal is ignored, because HAProxy's next worker will
                # not load the file.
                self._worker.ask(f"del ssl {action.store} {action.name}")
                self._names.get(action.store, set()).discard(action.name)
            case act.AddToCrtList():
                self._run(f"add ssl crt-list {action.crt_list} {action.name}", f"list {action.name}")
                self._list_changes(action.crt_list)[0].add(action.name)
            case act.RemoveFromCrtList():
                answer = self._worker.ask(f"del ssl crt-list {action.crt_list} {action.name}").strip()
                if answer != f"Entry '{action.name}' deleted in crtlist '{action.crt_list}'!":
                    raise HaproxyError(f"remove {action.name} from its crt-list", answer or "the answer is empty")
                self._list_changes(action.crt_list)[1].add(action.name)
            case act.AddTicketKeys():
                self._add_keys(action)

    def verify(self) -> None:
        """Read back all changed files; a `HaproxyError` names the first file that differs."""
        for (store, name), text in self._expected.items():
            if not self._holds(store, name, text):
                raise HaproxyError(f"confirm {name}", "the content in HAProxy differs from the file")
        for crt_list, (added, gone) in self._lists.items():
            found = self._crt_list_names(crt_list)
            if different := (added - gone - found) | (found & (gone - added)):
                raise HaproxyError(f"confirm {crt_list}", f"{min(different)} is missing or unexpected")
        for crt_list, wanted in self._whole_lists.items():
            if different := self._crt_list_names(crt_list) ^ wanted:
                raise HaproxyError(f"confirm {crt_list}", f"{min(different)} is missing or unexpected")
        for name in self._tickets:
            shown = [line.split()[1] for line in self._lines(f"show tls-keys {name}") if len(line.split()) > 1]
            if shown != self._keys(name):
                raise HaproxyError(f"confirm {name}", "the keys in HAProxy differ from the file")

    def expect(self, configuration: Configuration) -> None:
        """Let `verify` check all files of a configuration. Raises OSError if a file is missing."""
        texts = {name: self._read(name) for name in tls_diff.files_of_binds(configuration, "crt-list")}
        self._whole_lists = {
            name: {entry[0] for entry in tls_diff.crt_list_entries(text)} for name, text in texts.items()
        }
        for store, name in tls_diff.stored_names(TlsState(configuration, texts=texts)):
            self._expected[store, name] = _payload(self._read(name))
        self._tickets = sorted(tls_diff.files_of_binds(configuration, "tls-ticket-keys"))

    def _load(self, store: Store, name: str) -> None:
        text = _payload(self._read(name))
        if name not in self._known_names(store):
            self._create(store, name)
        try:
            self._set(store, name, text)
            self._run(f"commit ssl {store} {name}", f"commit {name}", f"Committing {name}")
        except HaproxyError:
            self._worker.ask(f"abort ssl {store} {name}")
            raise
        self._expected[store, name] = text

    def _known_names(self, store: Store) -> set[str]:
        """Return the names in one of HAProxy's stores; abort an open transaction."""
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

    def _create(self, store: Store, name: str) -> None:
        answer = self._worker.ask(f"new ssl {store} {name}").strip()
        if not (answer.startswith("New ") and answer.endswith(f"'{name}'!")):
            raise HaproxyError(f"create {name} in HAProxy", answer or "the answer is empty")
        self._known_names(store).add(name)

    def _set(self, store: Store, name: str, text: str) -> None:
        command = f"set ssl {store} {name}"
        answer = self._worker.ask(f"{command} <<\n{text}", shown=command).strip()
        if answer.lower() != f"transaction created for {_NOUNS[store]} {name}!".lower():
            raise HaproxyError(f"load {name} into HAProxy", "HAProxy refused it")

    def _run(self, command: str, what: str, first: str = "") -> None:
        answer = self._worker.ask(command).strip().splitlines()
        began = not first or (bool(answer) and answer[0].rstrip(".") == first)
        if len(answer) != 2 or answer[1] != _SUCCESS or not began:
            raise HaproxyError(f"have HAProxy {what}", "; ".join(answer) or "the answer is empty")

    def _list_changes(self, crt_list: str) -> tuple[set[str], set[str]]:
        return self._lists.setdefault(crt_list, (set(), set()))

    def _keys(self, name: str) -> list[str]:
        return self._read(name).split()[-TICKET_KEYS:]

    def _add_keys(self, action: act.AddTicketKeys) -> None:
        for key in self._keys(action.name)[-action.count :]:
            command = f"set ssl tls-key {action.name}"
            answer = self._worker.ask(f"{command} {key}", shown=command).strip()
            if answer != "TLS ticket key updated!":
                raise HaproxyError(f"add a key to {action.name}", "HAProxy refused it")
        self._tickets.append(action.name)

    def _read(self, name: str) -> str:
        return (self._directory / name).read_text(encoding="utf-8")

    def _crt_list_names(self, crt_list: str) -> set[str]:
        return {line.split()[0] for line in self._lines(f"show ssl crt-list {crt_list}")}

    def _lines(self, question: str) -> list[str]:
        return [line for line in self._worker.ask(question).splitlines() if line and not line.startswith("#")]

    def _holds(self, store: Store, name: str, text: str) -> bool:
        """Whether HAProxy reports the same leaf of a certificate, CAs, or serial numbers of a CRL."""
        answer = self._worker.ask(f"show ssl {store} {name}")
        blocks = [found.group(0) for found in _BLOCK.finditer(text)]
        if store == "crl-file":
            revoked = x509.revoked_serials(text)
            return revoked is None or x509.shown_serials(answer) == revoked
        wanted = [_fingerprint(block) for block in blocks]
        shown = _PRINT.findall(answer)
        return shown == wanted[:1] if store == "cert" else set(shown) == set(wanted)


def _payload(text: str) -> str:
    """Return a text without empty lines, because an empty line ends a payload on HAProxy's socket."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.strip())


def _fingerprint(block: str) -> str:
    """Return the fingerprint that HAProxy shows; trust does not depend on this fingerprint."""
    block = re.sub(r"(BEGIN|END) (?:X509|TRUSTED) ", r"\1 ", block)
    return hashlib.sha1(ssl.PEM_cert_to_DER_cert(block + "\n"), usedforsecurity=False).hexdigest().upper()
