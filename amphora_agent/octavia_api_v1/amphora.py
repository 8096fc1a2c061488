# SPDX-License-Identifier: Apache-2.0
"""The amphora behind Octavia's API: single requests plug, configure and start it.

Invariant: each change is a new generation of one bundle, which the applier applies. The agent stores the state after
the confirmation. These requests never change an amphora that serves a bundle of another controller.
"""

from __future__ import annotations

import json
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from amphora_agent.apply.applier import Applier
from amphora_agent.apply.change_log import ApplyResult
from amphora_agent.bundle import OCTAVIA_API_V1_ID, Bundle, Interface, Limits, digest, parse_stored
from amphora_agent.config import Settings
from amphora_agent.errors import AgentError, ConfigurationRefused, MachineError, RequestRefused
from amphora_agent.network import links
from amphora_agent.network.namespace import Namespace
from amphora_agent.network.pyroute2_lazy import IPRoute
from amphora_agent.octavia_api_v1 import firewall_rules, keepalived, ports, uploads
from amphora_agent.octavia_api_v1 import haproxy_cfg as text_of
from amphora_agent.octavia_api_v1 import stored_state as state_of
from amphora_agent.octavia_api_v1.stored_state import State
from amphora_agent.octavia_api_v1.uploads import Uploads
from amphora_agent.paths import Paths

_log = logging.getLogger(__name__)
# Octavia's API defines these error messages word for word. After NO_INTERFACE, Octavia's worker repeats its request.
NO_INTERFACE = "No suitable network interface found"
NO_LOAD_BALANCER = "Loadbalancer Not Found"


class OctaviaAmphora:
    """Performs the requests of Octavia's worker, one at a time. An upload changes the `settings`."""

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
        return self._state

    def _read(self) -> State:
        try:
            found = state_of.read(self._file)
        except MachineError as error:
            _log.error(
                "The agent cannot read its copy of the configuration of Octavia's worker, and changes nothing "
                "until the worker sends a configuration: %s",
                error,
            )
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

    def plug_vip(self, vip: str, document: Any) -> Interface:
        with self.changing(403):
            return self._plug(ports.vip_port(vip, document))

    def plug_network(self, document: Any) -> Interface:
        with self.changing(403):
            return self._plug(ports.member_port(document, self._state.interfaces))

    def _plug(self, port: Interface) -> Interface:
        if port.mac not in _macs() | self._inner.run(_macs):
            raise RequestRefused("Not Found", NO_INTERFACE, 404)
        wanted = replace(self._state.wanted, interfaces=ports.with_port(self._state.interfaces, port))
        self._apply(replace(self._state, wanted=wanted))
        return port

    def set_rules(self, document: Any) -> None:
        with self.changing():
            # For a new amphora, an empty list means that no rules apply. Later, Octavia's worker sends an empty list if
            # the rules have not changed.
            read = firewall_rules.read(document)
            if read or self._state.rules is None:
                self._apply(replace(self._state, rules=read))

    def upload(self, amphora_id: str, load_balancer_id: str, body: bytes) -> None:
        """Store a configuration for the next start or reload.

        Raises RequestRefused with HAProxy's message, or if the configuration belongs to another amphora.
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
        """Start, stop or reload HAProxy. Raises RequestRefused for an unknown load balancer or a failure."""
        with self.changing():
            if load_balancer_id != self._state.load_balancer_id or self._state.uploaded is None:
                raise RequestRefused(NO_LOAD_BALANCER, f"{load_balancer_id} was not uploaded", 404)
            try:
                return self._apply(self._bare(self._state) if action == "stop" else self._serving(self._state))
            except AgentError as error:
                raise RequestRefused(f"Error {action}ing haproxy", error.happened, 500) from error

    def delete(self, object_id: str) -> None:
        """Stop a load balancer and delete its state, if it exists."""
        with self.changing():
            if object_id == self._state.load_balancer_id:
                self._apply(replace(self._bare(self._state), load_balancer_id=None, uploaded=None))
                self._uploads.forget()

    def _serving(self, state: State) -> State:
        owner = state.load_balancer_id
        if owner is None or state.uploaded is None:
            raise RequestRefused(NO_LOAD_BALANCER, "no configuration was uploaded", 404)
        found = text_of.translate(state.uploaded, owner)
        if not found.ports:
            # HAProxy cannot run without an enabled listener, so the agent stops HAProxy.
            return self._bare(state)
        wanted = replace(
            state.wanted,
            haproxy=found.text,
            files=uploads.collect(found.files, lambda name: self._uploads.get(owner, name), owner),
            limits=Limits(found.connections, found.threads),
            pings=found.pings,
        )
        return replace(state, wanted=wanted, ports=frozenset(found.ports))

    def _bare(self, state: State) -> State:
        return replace(state, wanted=replace(state.wanted, haproxy=None, files=(), pings={}), ports=frozenset())

    def put_file(self, load_balancer_id: str, name: str, body: bytes) -> None:
        with self.changing():
            self._refuse_another(load_balancer_id)
            uploads.checked_name(name)
            self._uploads.put(load_balancer_id, name, uploads.checked_content(name, body))

    def file(self, load_balancer_id: str, name: str) -> bytes | None:
        content = self._uploads.get(load_balancer_id, uploads.checked_name(name))
        return None if content is None else content.encode()

    def delete_file(self, load_balancer_id: str, name: str) -> None:
        """Delete a file, which HAProxy uses until the next reload."""
        with self.changing():
            self._uploads.delete(load_balancer_id, uploads.checked_name(name))

    def upload_vrrp(self, body: bytes) -> None:
        """Store the VRRP configuration for the next start or reload of keepalived."""
        with self.changing():
            names = {each.name for each in self._state.interfaces}
            vrrp = keepalived.read(body.decode(errors="replace"), names)
            self._remember(replace(self._state, wanted=replace(self._state.wanted, vrrp=vrrp)))

    def act_vrrp(self, action: str) -> None:
        with self.changing():
            wanted = f"Failed to {action} octavia-keepalived service"
            if self._state.wanted.vrrp is None:
                raise RequestRefused(wanted, "no configuration was uploaded", 500)
            try:
                self._apply(replace(self._state, vrrp_started=action != "stop"))
            except AgentError as error:
                raise RequestRefused(wanted, error.happened, 500) from error

    @contextmanager
    def changing(self, status: int = 409) -> Iterator[None]:
        """Hold the lock for a change. Raises RequestRefused if another controller manages this amphora.

        The refusal of a plug request has another HTTP status, because the worker interprets 409 as success of the plug.
        """
        with self._lock:
            last = self._last()
            if last is not None and last.load_balancer_id != OCTAVIA_API_V1_ID:
                raise RequestRefused(
                    "Conflict", "another controller configures this amphora over the agent's API version 2", status
                )
            yield

    def _last(self) -> Bundle | None:
        confirmed = self._applier.confirmed or self._applier.lost
        return None if confirmed is None else confirmed.bundle

    def _refuse_another(self, load_balancer_id: str) -> None:
        if self._state.load_balancer_id not in (None, load_balancer_id):
            raise RequestRefused("Conflict", f"this amphora serves {self._state.load_balancer_id}", 409)
        if str(uuid.UUID(load_balancer_id)) != load_balancer_id:
            raise RequestRefused("Invalid request", f"{load_balancer_id} is not the id of a load balancer")

    def _bundle(self, state: State) -> Bundle:
        last = self._last()
        generation = 1 if last is None else last.generation + 1
        made = state_of.bundle(state, generation, pair=self._settings().pair)
        try:
            # A restarted agent must be able to parse the stored bundle. So the agent parses each bundle before it
            # stores the bundle.
            parse_stored(made.to_document())
        except (ValueError, KeyError, TypeError) as error:
            raise RequestRefused("Invalid request", str(error)) from error
        return made

    def _apply(self, state: State) -> ApplyResult:
        if self._applier.lost is not None and any(file.content is None for file in state.wanted.files):
            # A reboot deletes the TLS files. So no listener is served until Octavia's worker uploads the files again.
            state = self._bare(state)
        bundle = self._bundle(state)
        outcome = self._applier.apply_bundle(bundle, digest(json.dumps(bundle.to_document()).encode()))
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
    with IPRoute() as route:
        return {link.mac for link in links.list_links(route)}
