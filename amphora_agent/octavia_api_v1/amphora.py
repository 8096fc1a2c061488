# SPDX-License-Identifier: Apache-2.0
"""The amphora behind Octavia's API: single requests plug, configure and start it.

Invariant: each change is a new generation of one bundle. The applier applies it like any other bundle, and the state is
stored after the confirmation. An amphora that serves a bundle of another controller is never changed here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from amphora_agent.apply.applier import Applier
from amphora_agent.apply.result import ApplyResult
from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle, Interface, Limits, parse_stored
from amphora_agent.config import Settings
from amphora_agent.errors import AgentError, ConfigurationRefused, MachineError, RequestRefused
from amphora_agent.network import links
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute
from amphora_agent.octavia_api_v1 import certificates, firewall_rules, keepalived, ports
from amphora_agent.octavia_api_v1 import haproxy_cfg as text_of
from amphora_agent.octavia_api_v1 import stored_state as state_of
from amphora_agent.octavia_api_v1.haproxy_cfg import Translation
from amphora_agent.octavia_api_v1.stored_state import State
from amphora_agent.octavia_api_v1.uploads import Uploads
from amphora_agent.paths import Paths

_log = logging.getLogger(__name__)
# Messages of Octavia's API. Its worker retries after the first one.
NO_INTERFACE = "No suitable network interface found"
NO_LOAD_BALANCER = "Loadbalancer Not Found"
ACTIONS = ("start", "stop", "reload")


class OctaviaAmphora:
    """Performs the requests of Octavia's worker, one at a time.

    Args:
        settings: returns the present settings; an upload changes them.
    """

    def __init__(self, settings: Callable[[], Settings], paths: Paths, applier: Applier, inner: Namespace) -> None:
        self._settings = settings
        self._file = paths.var / "octavia.json"
        self._applier = applier
        self._inner = inner
        self._uploads = Uploads(paths)
        self._lock = threading.Lock()
        self._draining: tuple[str | None, frozenset[tuple[str, str]]] = None, frozenset()
        self._state = self._read()

    @property
    def state(self) -> State:
        """The state that the worker has requested."""
        return self._state

    def _read(self) -> State:
        try:
            found = state_of.read(self._file)
        except MachineError as error:
            _log.error("%s", error)
            found = None
        if found is not None:
            return found
        last = self._last()
        if last is not None and last.load_balancer_id == OCTAVIA_API_V1_ID:
            return state_of.recovered(last)
        return state_of.blank(self._settings().amphora_id)

    def draining(self) -> frozenset[tuple[str, str]]:
        """Return the members that get no new sessions, each with its backend."""
        text = self._state.wanted.haproxy
        if text != self._draining[0]:
            self._draining = text, frozenset() if text is None else text_of.draining(text)
        return self._draining[1]

    # -- ports ----------------------------------------------------------------------------------------------

    def plug_vip(self, vip: str, document: Any) -> Interface:
        """Add or change the interface with the VIPs."""
        with self.changing(403):
            port = ports.vip_port(vip, document)
            self._plug(port)
            return port

    def plug_network(self, document: Any) -> Interface:
        """Add or change an interface on a network of members."""
        with self.changing(403):
            port = ports.member_port(document, self._state.interfaces)
            self._plug(port)
            return port

    def _plug(self, port: Interface) -> None:
        if port.mac not in _macs() | self._inner.run(_macs):
            raise RequestRefused("Not Found", NO_INTERFACE, 404)
        wanted = replace(self._state.wanted, interfaces=ports.with_port(self._state.interfaces, port))
        self._apply(replace(self._state, wanted=wanted))

    def set_rules(self, document: Any) -> None:
        """Set the firewall rules."""
        with self.changing():
            # The worker sends an empty list for a new amphora. It must not open an amphora that has rules.
            read = firewall_rules.read(document)
            if read or self._state.rules is None:
                self._apply(replace(self._state, rules=read))

    # -- HAProxy --------------------------------------------------------------------------------------------

    def upload(self, amphora_id: str, load_balancer_id: str, body: bytes) -> None:
        """Store a configuration; the next start or reload serves it.

        Raises:
            RequestRefused: HAProxy refuses it (with its message), or it belongs to another amphora.
        """
        with self.changing():
            if amphora_id != str(self._settings().amphora_id):
                raise RequestRefused("Conflict", f"this is not amphora {amphora_id}", 409)
            self._refuse_another(load_balancer_id)
            try:
                uploaded = body.decode()
            except UnicodeDecodeError as error:
                raise RequestRefused("Invalid request", "the configuration is not UTF-8") from error
            if "\0" in uploaded:
                raise RequestRefused("Invalid request", "the configuration contains a NUL character")
            state = replace(self._state, load_balancer_id=load_balancer_id, uploaded=uploaded)
            try:
                self._applier.validate_bundle(self._bundle(self._serving(state)))
            except ConfigurationRefused as error:
                raise RequestRefused("Invalid request", error.happened) from error
            self._remember(state)

    def act(self, load_balancer_id: str, action: str) -> ApplyResult:
        """Start, stop or reload HAProxy.

        Raises:
            RequestRefused: the load balancer does not exist here, or the action failed.
        """
        with self.changing():
            if load_balancer_id != self._state.load_balancer_id or self._state.uploaded is None:
                raise RequestRefused(NO_LOAD_BALANCER, f"{load_balancer_id} was not uploaded", 404)
            try:
                return self._apply(self._bare(self._state) if action == "stop" else self._serving(self._state))
            except AgentError as error:
                raise RequestRefused(f"Error {action}ing haproxy", error.happened, 500) from error

    def delete(self, object_id: str) -> None:
        """Stop a load balancer and delete its state; no error if it does not exist."""
        with self.changing():
            if object_id == self._state.load_balancer_id:
                self._apply(replace(self._bare(self._state), load_balancer_id=None, uploaded=None))
                self._uploads.forget()

    def _translated(self, state: State) -> tuple[str, Translation]:
        if state.load_balancer_id is None or state.uploaded is None:
            raise RequestRefused(NO_LOAD_BALANCER, "no configuration was uploaded", 404)
        return state.load_balancer_id, text_of.translate(state.uploaded, state.load_balancer_id)

    def _serving(self, state: State) -> State:
        """Return the state in which HAProxy serves the last upload."""
        owner, found = self._translated(state)
        if not found.ports:
            return self._bare(state)  # All listeners are disabled, and HAProxy does not run without a listener.
        wanted = replace(
            state.wanted,
            haproxy=found.text,
            files=certificates.collect(found.files, lambda name: self._uploads.get(owner, name), owner),
            limits=Limits(found.connections, found.threads),
            pings=found.pings,
        )
        return replace(state, wanted=wanted, ports=found.ports)

    def _bare(self, state: State) -> State:
        """Return the state without HAProxy."""
        return replace(state, wanted=replace(state.wanted, haproxy=None, files=(), pings={}), ports=frozenset())

    # -- files ----------------------------------------------------------------------------------------------

    def put_file(self, load_balancer_id: str, name: str, body: bytes) -> None:
        """Store a certificate, a CA, a revocation list or a crt-list."""
        with self.changing():
            self._refuse_another(load_balancer_id)
            certificates.checked_name(name)
            self._uploads.put(load_balancer_id, name, certificates.checked_content(name, body))

    def file(self, load_balancer_id: str, name: str) -> bytes | None:
        """Return the content of an uploaded file; None if it does not exist."""
        content = self._uploads.get(load_balancer_id, certificates.checked_name(name))
        return None if content is None else content.encode()

    def delete_file(self, load_balancer_id: str, name: str) -> None:
        """Delete a file. HAProxy uses it until the next reload."""
        with self.changing():
            self._uploads.delete(load_balancer_id, certificates.checked_name(name))

    # -- keepalived -----------------------------------------------------------------------------------------

    def upload_vrrp(self, body: bytes) -> None:
        """Store the VRRP configuration; the next start or reload of keepalived uses it."""
        with self.changing():
            names = {each.name for each in self._state.interfaces}
            vrrp = keepalived.read(body.decode(errors="replace"), names)
            self._remember(replace(self._state, wanted=replace(self._state.wanted, vrrp=vrrp)))

    def act_vrrp(self, action: str) -> None:
        """Start, stop or reload keepalived."""
        with self.changing():
            wanted = f"Failed to {action} octavia-keepalived service"
            if self._state.wanted.vrrp is None:
                raise RequestRefused(wanted, "no configuration was uploaded", 500)
            try:
                self._apply(replace(self._state, vrrp_started=action != "stop"))
            except AgentError as error:
                raise RequestRefused(wanted, error.happened, 500) from error

    # -- the applier ----------------------------------------------------------------------------------------

    @contextmanager
    def changing(self, status: int = 409) -> Iterator[None]:
        """Hold the lock for a change.

        Args:
            status: HTTP status of the refusal. The worker interprets a 409 to a plug request as success.

        Raises:
            RequestRefused: another controller manages this amphora through the interface v2.
        """
        with self._lock:
            last = self._last()
            if last is not None and last.load_balancer_id != OCTAVIA_API_V1_ID:
                raise RequestRefused(
                    "Conflict", "this amphora is driven through the agent's own interface (v2)", status
                )
            yield

    def _last(self) -> Bundle | None:
        confirmed = self._applier.confirmed or self._applier.lost
        return None if confirmed is None else confirmed.bundle

    def _refuse_another(self, load_balancer_id: str) -> None:
        if self._state.load_balancer_id not in (None, load_balancer_id):
            raise RequestRefused("Conflict", f"this amphora serves {self._state.load_balancer_id}", 409)
        if str(uuid.UUID(load_balancer_id)) != load_balancer_id:
            raise RequestRefused("Invalid request", f"{load_balancer_id} is no load balancer's id")

    def _bundle(self, state: State) -> Bundle:
        last = self._last()
        generation = 1 if last is None else last.generation + 1
        made = state_of.bundle(state, generation, pair=self._settings().pair)
        try:
            parse_stored(made.to_document())  # A restarted agent validates it in the same way.
        except (ValueError, KeyError, TypeError) as error:
            raise RequestRefused("Invalid request", str(error)) from error
        return made

    def _apply(self, state: State) -> ApplyResult:
        if self._applier.lost is not None and any(file.content is None for file in state.wanted.files):
            # After a reboot the files are lost. The worker finds this and uploads everything again.
            state = self._bare(state)
        bundle = self._bundle(state)
        digest = hashlib.sha256(json.dumps(bundle.to_document()).encode()).hexdigest()
        outcome = self._applier.apply_bundle(bundle, digest)
        self._remember(state)
        return outcome

    def _remember(self, state: State) -> None:
        state = replace(state, wanted=state.wanted.without_contents())
        try:
            state_of.write(self._file, state)
        except OSError as error:
            raise MachineError("store the state of Octavia's requests", str(error)) from error
        self._state = state


def _macs() -> set[str]:
    """Return the MAC addresses of all interfaces of the calling network namespace."""
    with IPRoute() as route:
        return {link.mac for link in links.list_links(route)}
