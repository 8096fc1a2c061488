# SPDX-License-Identifier: Apache-2.0
"""Taking the steps a plan names.

Invariant: each step may be repeated from its beginning. It first makes sure that the lease still holds, then does its
work through a backend (all of them idempotent by id), then leaves its mark in the store under the same lease.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from amphora_driver.compute.interface import BootOrder, Compute, MachineState
from amphora_driver.controller import contents
from amphora_driver.controller import plan as planning
from amphora_driver.controller.bundle import Served, bundle
from amphora_driver.controller.configured import defaults, limited
from amphora_driver.errors import AgentRefused, AgentUnreachable, ComputeError, ModelError
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.queue.jobs import Lease, check, guard, note_outcome
from amphora_driver.render.haproxy import render
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, statuses
from amphora_driver.store.amphorae import Amphora, Plugged, State
from amphora_driver.store.tables import work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.agent_client import AgentClient
    from amphora_driver.backends import Catalogue
    from amphora_driver.certificates.authority import Authority
    from amphora_driver.model.loadbalancer import LoadBalancer
    from amphora_driver.network.interface import Network
    from amphora_driver.store.engine import Database
    from amphora_driver.store.vault import Vault

LOG = logging.getLogger(__name__)
_AGENT_CONF = """\
[agent]
amphora_id = {amphora_id}
bind_address = {{management_address}}
bind_port = {port}
services = {services}

[heartbeat]
interval = {interval:g}
targets = {targets}
"""
# Seconds after which somebody who waits for an agent looks whether its machine still runs.
_LOOK_AT_MACHINE = 1.0
# A configuration HAProxy refuses at one object is pushed again without it; more than so many objects are not its fault.
_MOST_CULPRITS = 16


class Backends(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the steps work through; the catalogue knows the compute and network backends by name."""

    conf: Any
    database: Any
    catalogue: Any
    agents: Any
    authority: Any
    vault: Any


class Steps:
    """Performs the steps of one load balancer under one lease."""

    def __init__(self, backends: Backends, lease: Lease) -> None:
        self._conf: ConfigOpts = backends.conf
        self._database: Database = backends.database
        self._catalogue: Catalogue = backends.catalogue
        self._agents: AgentClient = backends.agents
        self._authority: Authority = backends.authority
        self._vault: Vault = backends.vault
        self._lease = lease
        # What could not be served in the generation being pushed: reasons by object id.
        self._failed: dict[str, str] = {}

    def take(self, step: planning.AnyStep, wanted: planning.Wanted, observed: Sequence[Amphora]) -> None:
        """Perform one step.

        Raises:
            LeaseLost: somebody else works on the load balancer now.
            AmphoraDriverError: the step failed; it is taken again later.
        """
        LOG.info("load balancer %s: %s", wanted.load_balancer_id, _sentence(step))
        self._database.read(lambda connection: check(connection, self._lease))
        self._network: Network = self._catalogue.network(wanted.network)
        self._compute: Compute = self._catalogue.compute(wanted.compute, wanted.network)
        by_id = {one.id: one for one in observed}
        if isinstance(step, planning.Record):
            self._record(step)
        elif isinstance(step, planning.Boot):
            self._boot(by_id[step.amphora_id], wanted)
        elif isinstance(step, planning.Plug):
            self._plug(step)
        elif isinstance(step, planning.AwaitAgent):
            self._await_agent(step)
        elif isinstance(step, planning.Push):
            self._push([by_id[one] for one in step.amphora_ids], wanted)
        elif isinstance(step, planning.Confirm):
            self._confirm(wanted.generation)
        elif isinstance(step, planning.Unplug):
            self._unplug(by_id[step.amphora_id], step.network_id)
        elif isinstance(step, planning.Release):
            self._release(by_id[step.amphora_id])
        elif isinstance(step, planning.ReleaseVip):
            self._network.release_vip(wanted.load_balancer_id)
            self._confirm(wanted.generation)

    def _write(self, change: Callable[[sa.Connection], object]) -> None:
        def write(connection: sa.Connection) -> None:
            guard(connection, self._lease)
            change(connection)

        self._database.write(write)

    def _amphora(self, amphora_id: str) -> Amphora:
        found = self._database.read(
            lambda connection: amphorae.of_load_balancer(connection, self._lease.load_balancer_id)
        )
        return next(one for one in found if one.id == amphora_id)

    # --- an amphora comes -------------------------------------------------------------------------------------------

    def _record(self, step: planning.Record) -> None:
        amphora_id = str(uuid.uuid4())
        sealed = self._vault.seal(Secret(secrets.token_bytes(32)))
        self._write(
            lambda connection: amphorae.record(connection, amphora_id, self._lease.load_balancer_id, step.role, sealed)
        )

    def _boot(self, amphora: Amphora, wanted: planning.Wanted) -> None:
        issued = self._authority.issue_server(amphora.id, self._conf.certificates.validity_days)
        key = self._database.read(lambda connection: amphorae.heartbeat_key(connection, self._vault, amphora.id))
        if key is None:
            raise ComputeError(f"boot amphora {amphora.id}", "it is not recorded any more")
        conf = _AGENT_CONF.format(
            amphora_id=amphora.id,
            port=self._conf.agent.port,
            services=self._conf.agent.services,
            interval=self._conf.health.interval,
            targets=", ".join(self._conf.health.targets),
        )
        profile = Profile() if wanted.tree is None else wanted.tree.profile
        machine = self._compute.boot(
            BootOrder(
                amphora_id=amphora.id,
                load_balancer_id=amphora.load_balancer_id,
                flavor=profile.compute_flavor,
                zone=profile.compute_zone,
                image_tag=profile.image_tag,
                volume_zone=profile.volume_zone,
                management_network=profile.management_network,
                files={
                    "agent.conf": Secret(conf.encode()),
                    "server.pem": issued.bundle(),
                    "client_ca.pem": Secret(_read(self._conf.certificates.client_ca)),
                    "heartbeat.key": Secret(key.reveal().hex().encode()),
                },
            )
        )
        if machine.state is MachineState.FAILED:
            raise ComputeError(f"boot amphora {amphora.id}", machine.reason or "the machine failed")
        self._write(
            lambda connection: amphorae.change(
                connection,
                amphora.id,
                compute_id=machine.compute_id,
                management_address=machine.management_address,
                certificate_expires_at=issued.expires_at,
            )
        )

    def _plug(self, step: planning.Plug) -> None:
        amphora = self._amphora(step.amphora_id)
        port = self._network.ensure_port(amphora.id, step.network_id, step.subnet_ids)
        try:
            self._compute.attach(amphora.id, port)
        except ComputeError:
            if amphora.state is State.BOOTING:
                self._check_machine(amphora)
            raise
        subnets = tuple(
            self._network.subnet(subnet_id) for subnet_id in dict.fromkeys(one.subnet_id for one in port.addresses)
        )
        others = tuple(one for one in amphora.plugged if one.port.network_id != step.network_id)
        plugged = (*others, Plugged(port=port, subnets=subnets))
        self._write(lambda connection: amphorae.change(connection, amphora.id, plugged=plugged))

    def _await_agent(self, step: planning.AwaitAgent) -> None:
        amphora = self._amphora(step.amphora_id)
        if amphora.management_address is None:
            raise ComputeError(f"reach amphora {amphora.id}", "its management address is not known yet")
        deadline = time.monotonic() + self._conf.controller.boot_timeout
        while True:
            attempt = min(deadline, time.monotonic() + _LOOK_AT_MACHINE)
            try:
                self._agents.wait_until_ready(amphora.id, amphora.management_address, attempt)
                break
            except AgentUnreachable:
                if time.monotonic() >= deadline:
                    raise
                self._check_machine(amphora)
        self._write(lambda connection: amphorae.change(connection, amphora.id, state=State.READY, ready_at=time.time()))

    def _check_machine(self, amphora: Amphora) -> None:
        """Make sure that there is still something to wait for; what is not there is booted anew next time."""
        machine = self._compute.get(amphora.id)
        if machine is not None and machine.state is not MachineState.FAILED:
            return
        self._write(lambda connection: amphorae.change(connection, amphora.id, management_address=None, plugged=()))
        reason = machine.reason if machine is not None else ""
        raise ComputeError(f"boot amphora {amphora.id}", reason or "its machine ended before the agent answered")

    # --- a generation is served -------------------------------------------------------------------------------------

    def _push(self, targets: Sequence[Amphora], wanted: planning.Wanted) -> None:
        tree = wanted.tree
        if tree is None:
            raise ModelError("push a configuration", "nothing is wanted of this load balancer any more")
        self._failed = dict(wanted.failed)
        for _ in range(_MOST_CULPRITS):
            served = self._rendered(tree, wanted)
            try:
                self._push_served(targets, tree, wanted.generation, served)
            except AgentRefused as error:
                if error.status == HTTPStatus.CONFLICT and error.generation == wanted.generation:
                    self._take_next_generation(wanted)
                    return
                # HAProxy itself points at one object: everything else can be served without it.
                if error.object_id is None or error.object_id in self._failed:
                    raise
                LOG.warning("load balancer %s: leaving out %s: %s", tree.id, error.object_id, error.happened)
                self._failed[error.object_id] = error.happened
            else:
                return
        raise ModelError(
            f"find a configuration of load balancer {tree.id} that HAProxy takes",
            f"it was refused {_MOST_CULPRITS} times: {next(iter(self._failed.values()))}",
        )

    def _take_next_generation(self, wanted: planning.Wanted) -> None:
        """Have the next push carry a newer generation.

        An amphora serves this one already, with another content: what is configured, or how it is rendered, changed
        between an answer and the moment at which it would have been noted. The plan pushes again.
        """
        LOG.info("load balancer %s: generation %d is taken", wanted.load_balancer_id, wanted.generation)
        self._write(
            lambda connection: connection.execute(
                work.update()
                .where(work.c.load_balancer_id == wanted.load_balancer_id, work.c.generation == wanted.generation)
                .values(generation=wanted.generation + 1)
            )
        )

    def _rendered(self, tree: LoadBalancer, wanted: planning.Wanted) -> Served:
        """What of the load balancer can be served, whatever else was found not to be."""
        while True:
            rendered = render(tree, failed=self._failed, defaults=defaults(self._conf))
            self._failed |= {one.object_id: str(one) for one in rendered.refused if one.object_id}
            files, lost = contents.filled(rendered.files, wanted.secrets, self._vault)
            if not lost:
                return Served(text=rendered.text, files=files, pings=dict(rendered.pings))
            if lost.keys() <= self._failed.keys():
                raise ModelError(f"leave out what cannot be served of load balancer {tree.id}", str(lost))
            for object_id, reason in lost.items():
                LOG.warning("load balancer %s: leaving out %s: %s", tree.id, object_id, reason)
            self._failed |= lost

    def _push_served(self, targets: Sequence[Amphora], tree: LoadBalancer, generation: int, served: Served) -> None:
        def push(amphora: Amphora) -> None:
            body = bundle(limited(tree, self._conf), generation, amphora.id, amphora.plugged, served)
            applied = self._agents.put_bundle(amphora.id, str(amphora.management_address), body)
            if applied.generation != generation:
                raise AgentRefused(
                    f"have amphora {amphora.id} serve generation {generation}", f"it serves {applied.generation}"
                )
            LOG.info("amphora %s serves generation %d by %s (%s)", amphora.id, generation, applied.how, applied.reason)

        if len(targets) == 1:
            push(targets[0])
        else:
            with ThreadPoolExecutor(len(targets)) as pool:
                list(pool.map(push, targets))

        def confirm(connection: sa.Connection) -> None:
            for amphora in targets:
                amphorae.change(connection, amphora.id, confirmed=generation)
            # Usually this was the last one missing: one transaction for both marks.
            _confirm(connection, self._lease.load_balancer_id, generation, self._failed)

        self._write(confirm)

    def _confirm(self, generation: int) -> None:
        self._write(lambda connection: _confirm(connection, self._lease.load_balancer_id, generation, self._failed))

    # --- an amphora goes --------------------------------------------------------------------------------------------

    def _unplug(self, amphora: Amphora, network_id: str) -> None:
        for plugged in amphora.plugged:
            if plugged.port.network_id == network_id:
                self._compute.detach(amphora.id, plugged.port)
                self._network.delete_port(plugged.port.id)
        left = tuple(one for one in amphora.plugged if one.port.network_id != network_id)
        self._write(lambda connection: amphorae.change(connection, amphora.id, plugged=left))

    def _release(self, amphora: Amphora) -> None:
        self._compute.destroy(amphora.id)
        for port in self._network.ports(amphora.id):
            self._network.delete_port(port.id)
        self._write(lambda connection: amphorae.forget(connection, amphora.id))


def _confirm(connection: sa.Connection, load_balancer_id: str, generation: int, failed: dict[str, str]) -> None:
    connection.execute(work.update().where(work.c.load_balancer_id == load_balancer_id).values(applied=generation))
    statuses.confirm(connection, load_balancer_id, generation, failed)
    outcome = "served" if not failed else "served without " + ", ".join(sorted(failed))
    note_outcome(connection, load_balancer_id, generation, outcome)


def _sentence(step: planning.AnyStep) -> str:
    what = {name: value for name, value in msgspec.structs.asdict(step).items() if name != "reason"}
    return f"{type(step).__name__} {what or ''} because {step.reason}"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - one read of one option
        return file.read()
