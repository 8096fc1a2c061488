# SPDX-License-Identifier: Apache-2.0
"""Execution of the steps of a plan.

Invariant: each step can be repeated from its beginning. Before every external effect the executor checks the lease and
the precedence of other requests. The operations of backends are idempotent by id, and their results are recorded under
the same lease.
"""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from amphora_driver import failpoints, metrics
from amphora_driver.certificates.renewal import CertificateRenewer
from amphora_driver.compute.interface import BootRequest, Compute, Location, MachineState, Placement
from amphora_driver.compute.placement import boot_partners, complete_location, shares_host
from amphora_driver.deadline import apply_deadline
from amphora_driver.errors import (
    AgentError,
    AgentRefused,
    AgentUnreachable,
    AgentUntrusted,
    CertificateError,
    ComputeError,
)
from amphora_driver.model.amphora import Amphora, AmphoraState, AttachedPort
from amphora_driver.model.loadbalancer import Profile
from amphora_driver.network.interface import Network
from amphora_driver.queue.jobs import guard_lease
from amphora_driver.reconcile import steps, vip_allocation
from amphora_driver.reconcile.context import ReconcileContext
from amphora_driver.reconcile.defaults import agent_settings
from amphora_driver.reconcile.drain import AmphoraRemoval
from amphora_driver.reconcile.job import Job
from amphora_driver.reconcile.push import BundlePush
from amphora_driver.reconcile.spare_pool import SpareSteps
from amphora_driver.reconcile.vip_allocation import VipSteps
from amphora_driver.render.agent_conf import render_agent_conf
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, failovers, generations, rotations, spare_pools
from amphora_driver.store.failovers import Event
from amphora_driver.store.spare_pools import ROLE

LOG = logging.getLogger(__name__)
# Time-out in seconds of the first query of an agent. A longer wait would delay the jobs of other load balancers.
_FIRST_QUERY_TIMEOUT = 3.0
# The second amphora of a pair boots only after Nova has chosen a hypervisor for the first amphora. The controller
# checks this choice every _PARTNER_PAUSE seconds, for at most _MAX_PARTNER_WAIT seconds.
_PARTNER_PAUSE, _MAX_PARTNER_WAIT = 1.0, 60.0
_WITHOUT_MACHINE: dict[str, Any] = {
    **dict.fromkeys(("management_address", "booted_at", "certificate_issued_at", "certificate_authority", "trusts")),
    # Without this reset, the next boot of the partner would get a scheduler hint that names the deleted machine.
    **dict.fromkeys(("compute_id", "host", "zone")),
    "plugged": (),
}
# Before each of these steps, the executor reads the amphorae again, unless the plan has just read them.
_READING_STEPS = (steps.Boot, steps.Plug, steps.AwaitAgent)
# These steps only write to the database. The write checks the lease, so the executor does not check the lease before
# the step.
_RECORDING_STEPS = (steps.Record, steps.Confirm)


class StepExecutor:
    """Performs the steps of one load balancer in one job.

    Attributes:
        absent: amphorae whose agents did not answer in this job, or whose boots are delayed.
        boots_at: times at which delayed boots may start, by amphora id.
        vips_taken: whether an amphora of a new pair has the VIPs; None without a query in this job.
    """

    def __init__(self, context: ReconcileContext, job: Job) -> None:
        self.absent: frozenset[str] = frozenset()
        self.boots_at: dict[str, float] = {}
        self.vips_taken: bool | None = None
        self._context = context
        self._conf = context.conf
        self._database = context.database
        self._job = job
        self._step_label = ""
        self._amphorae: tuple[Amphora, ...] = ()
        # The keys of the amphorae that this job has recorded.
        self._heartbeat_keys: dict[str, Secret] = {}
        self.renewal = CertificateRenewer(self._conf, self._database, self._context.agents, context.trust, job)
        self._push = BundlePush(context, job, self._write)
        self._vip_steps = VipSteps(self._database, self._write, self._conf.amp_network.vip_timeout)
        self.removal = AmphoraRemoval(context, job, self._write)
        self.spares = SpareSteps(context, job, self._write)

    def execute(self, step: steps.Step, view: steps.AnyView, observed: Sequence[Amphora]) -> None:
        """Perform one step.

        Raises:
            LeaseLost: another controller has the lease.
            Superseded: a request has precedence.
            AmphoraDriverError: the step failed; a later job repeats it.
        """
        what = {name: value for name, value in msgspec.structs.asdict(step).items() if name != "reason"}
        words = (view.load_balancer_id, type(step).__name__, what or "", step.reason)
        LOG.info("load balancer %s: the controller starts step %s %s because %s", *words)
        self._job.begin_step()
        is_checked = self._job.take_check()
        if isinstance(step, _READING_STEPS):
            self._amphorae = tuple(observed) if is_checked else self._job.load_amphorae()
        elif not is_checked and not isinstance(step, _RECORDING_STEPS):
            self._job.ensure_may_act()
        self._network: Network = self._context.catalogue.network(view.network)
        self._compute: Compute = self._context.catalogue.compute(view.compute, view.network)
        self._step_label = str(step.__struct_config__.tag)
        failpoints.reach_step(self._step_label, failpoints.Moment.BEFORE)
        with apply_deadline(self._job.deadline), metrics.step(self._step_label):
            self._perform(step, view, {one.id: one for one in observed})
        failpoints.reach_step(self._step_label, failpoints.Moment.MARKED)

    def _perform(self, step: steps.Step, view: steps.AnyView, by_id: dict[str, Amphora]) -> None:
        match step:
            case steps.Record():
                self._record(step)
            case steps.Boot():
                self._boot(by_id[step.amphora_id], view)
            case steps.AwaitAgent():
                self._await_agent(step)
            case steps.RenewCertificate():
                self.renewal.renew(by_id[step.amphora_id])
            case steps.Release():
                self.removal.delete_amphora(by_id[step.amphora_id], view, self._compute, self._network)
            case steps.RetireSpare():
                self._write(lambda c: spare_pools.retire_spare(c, step.amphora_id, view.load_balancer_id, step.reason))
            case steps.QuerySpares():
                self.spares.query(step, by_id)
            case steps.DeletePool():
                self.spares.delete_pool(view.load_balancer_id)
            case _ if isinstance(view, steps.LoadBalancerView):
                self._perform_for_load_balancer(step, view, by_id)
            case _:
                raise TypeError(f"{type(step).__name__} is not a step of a spare pool")

    def _perform_for_load_balancer(
        self, step: steps.Step, view: steps.LoadBalancerView, by_id: dict[str, Amphora]
    ) -> None:
        match step:
            case steps.Adopt():
                self.spares.adopt(step, view, self._database.now())
            case steps.SetSparePool():
                self._write(lambda c: spare_pools.set_spare_pool(c, view.load_balancer_id, step.spec, step.former))
            case steps.Plug():
                self._plug(step, view)
            case steps.Unplug():
                self._unplug(by_id[step.amphora_id], (step.network_id, step.sr_iov))
            case steps.BumpGeneration():
                self._write(lambda c: generations.bump_generation(c, view.load_balancer_id, view.generation))
            case steps.Push():
                self._push.push(step, view, tuple(by_id.values()))
            case steps.Confirm():
                self._push.confirm(view)
            case _:
                self._perform_for_vips(step, view, by_id)

    def _perform_for_vips(self, step: steps.Step, view: steps.LoadBalancerView, by_id: dict[str, Amphora]) -> None:
        match step:
            case steps.AllocateVip() if view.tree is not None:
                machines = [one.compute_id for one in by_id.values() if one.compute_id]
                self._vip_steps.allocate(self._network, view.tree, view.network, view.generation, machines)
            case steps.ApplyVipOptions() if view.tree is not None:
                self._vip_steps.apply(self._network, view.tree, tuple(by_id.values()), view.generation)
            case steps.ReleaseVip():
                self._network.release_load_balancer(view.load_balancer_id)
                self._compute.release_load_balancer(view.load_balancer_id)
                self._push.confirm(view)
            case steps.QueryVips():
                self.vips_taken = self._push.query_vips_taken(tuple(by_id.values()))
            case steps.QueryVipHolder():
                self.removal.query_holder(step, by_id)
            case steps.HandOver():
                pair = by_id[step.amphora_id], by_id[step.to]
                ports = () if view.tree is None else vip_allocation.vip_ports(view.tree, pair)
                self.removal.hand_over_vips(*pair, direct_answers=self._network.direct_answers_allowed(ports))
            case steps.CheckDrain():
                self.removal.check_drain(step, by_id[step.amphora_id])
            case _:
                raise TypeError(f"{type(step).__name__} is not a step of a load balancer")

    def _write(self, change: Callable[[sa.Connection], object], applied: int | None = None) -> None:
        def write(connection: sa.Connection) -> None:
            guard_lease(connection, self._job.lease, applied)
            change(connection)

        failpoints.reach_step(self._step_label, failpoints.Moment.DONE)
        self._database.write(write)

    def _update(self, amphora_id: str, event: Event | None = None, **values: Any) -> None:
        """Update an amphora's row, and record the event of a fail-over in progress."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            amphorae.update_amphora(connection, amphora_id, **values)
            if event is not None and self._job.replacing:
                failovers.record_event(connection, self._job.lease.load_balancer_id, event, now, amphora_id)

        self._write(write)

    def _amphora(self, amphora_id: str) -> Amphora:
        return next(one for one in self._amphorae if one.id == amphora_id)

    def _load_amphorae(self, connection: sa.Connection) -> tuple[Amphora, ...]:
        return amphorae.load_amphorae(connection, self._job.lease.load_balancer_id)

    def _record(self, step: steps.Record) -> None:
        amphora_id, key = str(uuid.uuid4()), Secret(secrets.token_bytes(32))
        sealed = self._context.vault.seal(key, amphorae.key_location(amphora_id))
        of, now = self._job.lease.load_balancer_id, self._database.now()

        def write(connection: sa.Connection) -> None:
            amphorae.insert_amphora(connection, amphora_id, of, step.role, sealed)
            if self._job.replacing:
                failovers.record_event(connection, of, Event.RECORDED, now, amphora_id)

        self._write(write)
        self._heartbeat_keys[amphora_id] = key

    def _boot(self, amphora: Amphora, view: steps.AnyView) -> None:
        profile = _profile(view)
        zones = self._permitted_zones(profile)
        spare = isinstance(view, steps.SparePoolView)
        # `_amphorae` was read at the start of this step, because another amphora may have booted since the start of the
        # job.
        others = self._amphorae
        if (not spare and self._awaits_partner(amphora, others, zones)) or self._delays_boot(amphora):
            return
        conf = render_agent_conf(
            amphora.id,
            port=self._conf.amp_agent.port,
            services=self._conf.amp_agent.services,
            settings=agent_settings(self._conf),
        )
        key = self._heartbeat_keys.get(amphora.id) or self._job.read_if_allowed(
            lambda c: amphorae.read_heartbeat_key(c, self._context.vault, amphora.id)
        )
        if key is None:
            raise ComputeError(f"boot amphora {amphora.id}", "it is not recorded")
        identity, expires_at = self._issue_credentials(amphora)
        heartbeat_key = Secret(key.reveal().hex().encode())
        files = {"agent.conf": Secret(conf.encode()), **identity, "heartbeat.key": heartbeat_key}
        machine = self._compute.boot(
            BootRequest(
                amphora_id=amphora.id,
                load_balancer_id=amphora.load_balancer_id,
                flavor=profile.compute_flavor,
                zones=zones,
                image_tag=profile.image_tag,
                volume_zone=profile.volume_zone,
                management_networks=_optional(profile.management_network),
                partners=boot_partners(others, amphora.id),
                placement=Placement(self._conf.amp_compute.placement),
                spare=spare,
                files=files,
            )
        )
        if machine.state is MachineState.FAILED:
            raise ComputeError(
                f"boot amphora {amphora.id}", machine.reason or "the compute backend reports that its machine failed"
            )
        booted_at = amphora.booted_at or self._database.now()
        location = complete_location(machine, amphora)
        self._update(
            amphora.id,
            Event.BOOTED,
            compute_id=machine.compute_id,
            image=machine.image,
            management_address=machine.management_address,
            host=location.host,
            zone=location.zone,
            booted_at=booted_at,
            certificate_expires_at=expires_at,
        )

    def _permitted_zones(self, profile: Profile) -> tuple[str, ...]:
        """Return the zones for a new machine: without the one that a rotation evacuates, if others are left."""
        zones = profile.list_compute_zones() or self._compute.default_zones
        if len(zones) < 2:
            return zones
        active = self._database.read(rotations.get_active_rotation)
        return tuple(one for one in zones if active is None or one != active.wanted.zone)

    def _awaits_partner(self, amphora: Amphora, others: Sequence[Amphora], zones: tuple[str, ...]) -> bool:
        """Whether the boot waits until the backend can separate it from a partner that boots too.

        The delay is limited, because a pair on one hypervisor is better than half of a pair. A machine that may exist
        already is not delayed.
        """
        if amphora.booted_at is not None or self._conf.amp_compute.placement == Placement.NONE.value:
            return False
        now = self._database.now()
        recent = [
            one
            for one in others
            if one.host is None and one.booted_at is not None and abs(now - one.booted_at) < _MAX_PARTNER_WAIT
        ]
        partners = boot_partners(recent, amphora.id)
        if not partners:
            return False
        if self._compute.can_separate(partners, zones):
            # The query of the compute backend may take long, and the boot follows.
            self._job.ensure_may_act()
            return False
        LOG.info(
            "the controller delays the boot of amphora %s, because its partner %s is still being built",
            amphora.id,
            partners[0].amphora_id,
        )
        self.boots_at[amphora.id] = now + _PARTNER_PAUSE
        self.absent |= {amphora.id}
        return True

    def _delays_boot(self, amphora: Amphora) -> bool:
        """Whether the rate limit delays the boot. A machine that may exist already is not delayed."""
        if self._context.boot_rate is None or amphora.booted_at is not None:
            return False
        wait = self._context.boot_rate.reserve(amphora.id, time.monotonic(), urgent=self._job.replacing)
        if wait:
            self.boots_at[amphora.id] = self._database.now() + wait
            self.absent |= {amphora.id}
        return wait > 0

    def _issue_credentials(self, amphora: Amphora) -> tuple[dict[str, Secret], float]:
        given = self.renewal.issue_for_boot(amphora, exists=lambda: self._compute.get(amphora.id) is not None)
        if given is not None:
            credentials, issued = given
            client_ca, server_ca = credentials.client_ca, credentials.server_ca
        elif self._context.authority is None:
            raise CertificateError(f"issue the certificate of amphora {amphora.id}", "no certificate authority exists")
        else:
            options = self._conf.amp_certificates
            issued = self._context.authority.issue_server(amphora.id, options.validity_days)
            client_ca, server_ca = Path(options.client_ca).read_bytes(), Path(options.ca_certificate).read_bytes()
        files = {"server.pem": issued.bundle(), "client_ca.pem": Secret(client_ca), "server_ca.pem": Secret(server_ca)}
        return files, issued.expires_at

    def _plug(self, step: steps.Plug, view: steps.LoadBalancerView) -> None:
        amphora = self._amphora(step.amphora_id)
        port = self._network.ensure_port(vip_allocation.request_port(step, view))
        self._job.ensure_may_act()
        try:
            self._compute.attach(amphora.id, port)
        except ComputeError:
            if amphora.state is AmphoraState.BOOTING:
                self._check_machine(amphora)
            raise
        subnets = tuple(map(self._network.subnet, dict.fromkeys(one.subnet_id for one in port.addresses)))
        made = AttachedPort(port=port, subnets=subnets, sr_iov=step.sr_iov)
        # A port must be in only one record. Otherwise, the removal of one record would delete a port that another
        # record still needs.
        others = tuple(one for one in amphora.plugged if one.key != made.key and one.port.id != port.id)
        self._update(amphora.id, plugged=(*others, made))

    def _await_agent(self, step: steps.AwaitAgent) -> None:
        """Query an agent once; the wait for a booting amphora uses neither this thread nor the lease."""
        amphora = self._amphora(step.amphora_id)
        if amphora.management_address is None:
            # The compute backend may assign the management address only after the boot has begun, so a missing address
            # is no error yet.
            self._check_boot_timeout(amphora, AgentUnreachable("reach it", "its management address is not known"))
            self.absent |= {amphora.id}
            return
        deadline = self._job.deadline.within(_FIRST_QUERY_TIMEOUT)
        try:
            self._context.agents.wait_until_ready(amphora.id, amphora.management_address, deadline)
        except (AgentUnreachable, AgentRefused, AgentUntrusted) as error:
            self._check_machine(amphora)
            self._check_boot_timeout(amphora, error)
            if not isinstance(error, AgentUnreachable):
                # If the agent refuses the request or fails to prove its identity, another machine may use the address.
                # Waiting longer would not help.
                raise
            LOG.info(
                "the agent of booting amphora %s does not answer yet; the controller queries the agent again later: %s",
                amphora.id,
                error.happened,
            )
            self.absent |= {amphora.id}
            return
        location = self._locate(amphora)
        ready = {"state": AmphoraState.READY, "ready_at": self._database.now()}
        self._update(amphora.id, Event.READY, **ready, host=location.host, zone=location.zone)

    def _locate(self, amphora: Amphora) -> Location:
        """Return where the machine runs; delete it if the placement forbids the hypervisor."""
        forbidden = self._conf.amp_compute.placement == Placement.REQUIRED.value
        recorded = Location(host=amphora.host, zone=amphora.zone)
        try:
            machine = self._compute.get(amphora.id)
        except ComputeError as error:
            if forbidden:
                raise
            # The agent answers already, so an error of the compute backend must not delay the service.
            LOG.warning(
                "the controller could not read the hypervisor and the zone of amphora %s, and continues without "
                "this information: %s",
                amphora.id,
                error,
            )
            return recorded
        location = recorded if machine is None else complete_location(machine, amphora)
        # Spare amphorae belong to no load balancer, so they may share a hypervisor.
        if not forbidden or amphora.role == ROLE:
            return location
        if not shares_host(location, boot_partners(self._database.read(self._load_amphorae), amphora.id)):
            return location
        self._job.ensure_may_act()
        self._compute.destroy(amphora.id)
        self._update(amphora.id, **_WITHOUT_MACHINE)
        raise ComputeError(
            f"boot amphora {amphora.id}",
            "its machine runs on the hypervisor of another amphora of the load balancer, and [amp_compute] placement "
            "is required",
            "See the section on placement in docs/reference/nova.md.",
            final=True,
        )

    def _check_machine(self, amphora: Amphora) -> None:
        """Check that the machine runs; otherwise reset the amphora, so that the next job boots it again."""
        machine = self._compute.get(amphora.id)
        if machine is not None and machine.state is not MachineState.FAILED:
            return
        self._update(amphora.id, **_WITHOUT_MACHINE)
        reason = machine.reason if machine is not None else ""
        raise ComputeError(f"boot amphora {amphora.id}", reason or "its machine ended before the agent in it answered")

    def _check_boot_timeout(self, amphora: Amphora, error: AgentError) -> None:
        """Delete a machine whose agent exceeds the boot time-out; the next job boots it again."""
        most, now = float(self._conf.amp_controller.boot_timeout), self._database.now()
        if amphora.booted_at is None:
            self._update(amphora.id, booted_at=now)
            return
        if now < amphora.booted_at + most or self._database.seconds_since_clock_jump() < most:
            return
        self._job.ensure_may_act()
        self._compute.destroy(amphora.id)
        self._update(amphora.id, **_WITHOUT_MACHINE)
        happened = f"its agent has not answered in {most:g} s: {error.happened}"
        # The boot time-out has passed, so the error is final: the load balancer becomes ERROR before the amphora boots
        # again.
        raise ComputeError(f"boot amphora {amphora.id}", happened, final=True)

    def _unplug(self, amphora: Amphora, key: tuple[str, bool]) -> None:
        for plugged in amphora.plugged:
            if plugged.key == key:
                self._compute.detach(amphora.id, plugged.port)
                self._job.ensure_may_act()
                self._network.delete_port(plugged.port.id)
        left = tuple(one for one in amphora.plugged if one.key != key)
        self._update(amphora.id, plugged=left)


def _profile(view: steps.AnyView) -> Profile:
    if isinstance(view, steps.SparePoolView):
        return view.stock.spec.profile()
    return Profile() if view.tree is None else view.tree.profile


def _optional(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)
