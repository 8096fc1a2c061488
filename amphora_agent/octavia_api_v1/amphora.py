# SPDX-License-Identifier: Apache-2.0
"""An amphora as Octavia's worker sees it: plugged, configured and started in single requests.

Invariant: each change is a new generation of one bundle, applied by the same engine as any other, and it is remembered
only after the engine has confirmed it. An amphora that another controller has given a bundle is never changed here.
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
# What Octavia's API says in these cases; its worker waits and asks again when it reads the first one.
NO_INTERFACE = "No suitable network interface found"
NO_LOAD_BALANCER = "Loadbalancer Not Found"
ACTIONS = ("start", "stop", "reload")


class OctaviaAmphora:
    """What Octavia's worker may do with this amphora. One request at a time.

    Args:
        settings: gives those of now; an upload changes them.
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
        """What the worker has said."""
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
        """The members that get no new sessions, each with its backend."""
        text = self._state.wanted.haproxy
        if text != self._draining[0]:
            self._draining = text, frozenset() if text is None else text_of.draining(text)
        return self._draining[1]

    # -- ports ----------------------------------------------------------------------------------------------

    def plug_vip(self, vip: str, document: Any) -> Interface:
        """Have the port with the VIPs."""
        with self.changing(403):
            port = ports.vip_port(vip, document)
            self._plug(port)
            return port

    def plug_network(self, document: Any) -> Interface:
        """Have a port in a network of members, or another state of one."""
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
        """Let in what the rules name."""
        with self.changing():
            # No rule at all is said of an amphora that was just booted; it must not open one that has rules.
            read = firewall_rules.read(document)
            if read or self._state.rules is None:
                self._apply(replace(self._state, rules=read))

    # -- HAProxy --------------------------------------------------------------------------------------------

    def upload(self, amphora_id: str, load_balancer_id: str, body: bytes) -> None:
        """Take a configuration; it is served from the next start or reload on.

        Raises:
            RequestRefused: HAProxy refuses it (in its own words), or it is not for this amphora.
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
            RequestRefused: there is no such load balancer here, or it could not be done.
        """
        with self.changing():
            if load_balancer_id != self._state.load_balancer_id or self._state.uploaded is None:
                raise RequestRefused(NO_LOAD_BALANCER, f"{load_balancer_id} was not uploaded", 404)
            try:
                return self._apply(self._bare(self._state) if action == "stop" else self._serving(self._state))
            except AgentError as error:
                raise RequestRefused(f"Error {action}ing haproxy", error.happened, 500) from error

    def delete(self, object_id: str) -> None:
        """Serve a load balancer no longer and forget all of it; no error if it is not here."""
        with self.changing():
            if object_id == self._state.load_balancer_id:
                self._apply(replace(self._bare(self._state), load_balancer_id=None, uploaded=None))
                self._uploads.forget()

    def _translated(self, state: State) -> tuple[str, Translation]:
        if state.load_balancer_id is None or state.uploaded is None:
            raise RequestRefused(NO_LOAD_BALANCER, "no configuration was uploaded", 404)
        return state.load_balancer_id, text_of.translate(state.uploaded, state.load_balancer_id)

    def _serving(self, state: State) -> State:
        """The state in which the last upload is served."""
        owner, found = self._translated(state)
        if not found.ports:
            return self._bare(state)  # every listener is switched off, and HAProxy does not run without one
        wanted = replace(
            state.wanted,
            haproxy=found.text,
            files=certificates.collect(found.files, lambda name: self._uploads.get(owner, name), owner),
            limits=Limits(found.connections, found.threads),
            pings=found.pings,
        )
        return replace(state, wanted=wanted, ports=found.ports)

    def _bare(self, state: State) -> State:
        """The state in which no HAProxy is wanted."""
        return replace(state, wanted=replace(state.wanted, haproxy=None, files=(), pings={}), ports=frozenset())

    # -- files ----------------------------------------------------------------------------------------------

    def put_file(self, load_balancer_id: str, name: str, body: bytes) -> None:
        """Take a certificate, an authority, a revocation list or a crt-list."""
        with self.changing():
            self._refuse_another(load_balancer_id)
            certificates.checked_name(name)
            self._uploads.put(load_balancer_id, name, certificates.checked_content(name, body))

    def file(self, load_balancer_id: str, name: str) -> bytes | None:
        """What was uploaded under a name."""
        content = self._uploads.get(load_balancer_id, certificates.checked_name(name))
        return None if content is None else content.encode()

    def delete_file(self, load_balancer_id: str, name: str) -> None:
        """Forget a file. What is served keeps it until the next reload."""
        with self.changing():
            self._uploads.delete(load_balancer_id, certificates.checked_name(name))

    # -- keepalived -----------------------------------------------------------------------------------------

    def upload_vrrp(self, body: bytes) -> None:
        """Take how this amphora is one of a pair; it counts from the next start or reload of keepalived on."""
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

    # -- the engine -----------------------------------------------------------------------------------------

    @contextmanager
    def changing(self, status: int = 409) -> Iterator[None]:
        """Within the block nobody else changes anything.

        Args:
            status: of the answer if the amphora is another controller's. The worker takes a 409 to plugging for
                success.

        Raises:
            RequestRefused: it is.
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
            parse_stored(made.to_document())  # an agent that starts again reads it with no less care
        except (ValueError, KeyError, TypeError) as error:
            raise RequestRefused("Invalid request", str(error)) from error
        return made

    def _apply(self, state: State) -> ApplyResult:
        if self._applier.lost is not None and any(file.content is None for file in state.wanted.files):
            # The machine was booted anew; the worker finds its files missing and says everything again.
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
            raise MachineError("write down what Octavia said", str(error)) from error
        self._state = state


def _macs() -> set[str]:
    """The MAC addresses of the interfaces where it is called."""
    with IPRoute() as route:
        return {link.mac for link in links.list_links(route)}
