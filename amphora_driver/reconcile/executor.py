# SPDX-License-Identifier: Apache-2.0
"""Execution of the steps of a plan.

Invariant: each step can be repeated from its beginning. Before every external effect it checks the lease and the
precedence of other requests. It works through a backend, whose operations are idempotent by id, and records its result
in the store under the same lease.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from amphora_driver import failpoints, metrics
from amphora_driver.certificates.renewal import CertificateRenewer
from amphora_driver.compute.interface import BootRequest, Compute, MachineState
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
from amphora_driver.queue.jobs import guard_lease
from amphora_driver.reconcile import plan as planning
from amphora_driver.reconcile import vip_allocation
from amphora_driver.reconcile.drain import AmphoraRemoval
from amphora_driver.reconcile.push import BundlePush
from amphora_driver.reconcile.spare_pool import SpareSteps
from amphora_driver.reconcile.steps import step_label
from amphora_driver.reconcile.vip_allocation import VipSteps
from amphora_driver.render.agent_conf import render_agent_conf
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae, failovers, generations
from amphora_driver.store.failovers import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import sqlalchemy as sa

    from amphora_driver.network.interface import Network
    from amphora_driver.reconcile.context import ReconcileContext
    from amphora_driver.reconcile.job import Job

LOG = logging.getLogger(__name__)
# Time-out in seconds of the first query of an agent: a longer wait would delay other jobs.
_FIRST_QUERY_TIMEOUT = 3.0
# Values of an amphora without a machine.
_WITHOUT_MACHINE: dict[str, Any] = {
    "management_address": None,
    "plugged": (),
    "booted_at": None,
    "certificate_issued_at": None,
    "certificate_authority": None,
    "trusts": None,
}


class StepExecutor:
    """Performs the steps of one load balancer in one job.

    Attributes:
        absent: amphorae whose agents did not answer in this job.
        vips_taken: whether an amphora of a new pair has the VIPs; None without a query in this job.
    """

    def __init__(self, context: ReconcileContext, job: Job) -> None:
        self.absent: frozenset[str] = frozenset()
        self.vips_taken: bool | None = None
        self._conf = context.conf
        self._database = context.database
        self._catalogue = context.catalogue
        self._agents = context.agents
        self._authority = context.authority
        self._vault = context.vault
        self._job = job
        self._lease = job.lease
        self._step_label = ""
        self.renewal = CertificateRenewer(self._conf, self._database, self._agents, context.trust, job)
        self._push = BundlePush(context, job, self._write)
        self._vip_steps = VipSteps(self._database, self._write, self._conf.amp_network.vip_timeout)
        self.removal = AmphoraRemoval(context, job, self._write)
        self.spares = SpareSteps(context, job, self._write)

    def execute(self, step: planning.AnyStep, view: planning.AnyView, observed: Sequence[Amphora]) -> None:
        """Perform one step.

        Raises:
            LeaseLost: another controller has the lease.
            Superseded: a request has precedence.
            AmphoraDriverError: the step failed; a later job repeats it.
        """
        LOG.info("load balancer %s: %s", view.load_balancer_id, _describe(step))
        self._job.begin_step()
        self._job.ensure_may_act()
        self._network: Network = self._catalogue.network(view.network)
        self._compute: Compute = self._catalogue.compute(view.compute, view.network)
        self._step_label = step_label(step)
        failpoints.reach_step(self._step_label, failpoints.Moment.BEFORE)
        with apply_deadline(self._job.deadline), metrics.step(self._step_label):
            self._perform(step, view, {one.id: one for one in observed})
        failpoints.reach_step(self._step_label, failpoints.Moment.MARKED)

    def _perform(self, step: planning.AnyStep, view: planning.AnyView, by_id: dict[str, Amphora]) -> None:
        match step:
            case planning.Record():
                self._record(step)
            case planning.Boot():
                self._boot(by_id[step.amphora_id], view)
            case planning.AwaitAgent():
                self._await_agent(step)
            case planning.RenewCertificate():
                self.renewal.renew(by_id[step.amphora_id])
            case planning.Release():
                self._release(by_id[step.amphora_id], view)
            case planning.RetireSpare():
                self.spares.retire(step, view.load_balancer_id)
            case planning.QuerySpares():
                self.spares.query(step, by_id)
            case planning.DeletePool():
                self.spares.delete_pool(view.load_balancer_id)
            case _ if isinstance(view, planning.LoadBalancerView):
                self._perform_for_load_balancer(step, view, by_id)
            case _:
                raise _no_such_step(step, "spare pool")

    def _perform_for_load_balancer(
        self, step: planning.AnyStep, view: planning.LoadBalancerView, by_id: dict[str, Amphora]
    ) -> None:
        match step:
            case planning.Adopt():
                self.spares.adopt(step, view, self._database.now())
            case planning.SetSparePool():
                self.spares.set_pool(step, view)
            case planning.Plug():
                self._plug(step, view)
            case planning.Unplug():
                self._unplug(by_id[step.amphora_id], step.network_id)
            case planning.BumpGeneration():
                self._bump_generation(view)
            case planning.Push():
                self._push.push(step, view, tuple(by_id.values()))
            case planning.Confirm():
                self._push.confirm(view)
            case _:
                self._perform_for_vips(step, view, by_id)

    def _perform_for_vips(
        self, step: planning.AnyStep, view: planning.LoadBalancerView, by_id: dict[str, Amphora]
    ) -> None:
        match step:
            case planning.AllocateVip():
                self._allocate_vip(view, by_id)
            case planning.ApplyVipOptions():
                self._apply_vip_options(view, by_id)
            case planning.ReleaseVip():
                self._release_vip(view)
            case planning.QueryVips():
                self._query_vips(tuple(by_id.values()))
            case planning.QueryVipHolder():
                self.removal.query_holder(step, by_id)
            case planning.HandOver():
                self._hand_over(by_id[step.amphora_id], by_id[step.to], view)
            case planning.CheckDrain():
                self.removal.check_drain(step, by_id[step.amphora_id])
            case _:
                raise _no_such_step(step, "load balancer")

    def _write(self, change: Callable[[sa.Connection], object], applied: int | None = None) -> None:
        def write(connection: sa.Connection) -> None:
            guard_lease(connection, self._lease, applied)
            change(connection)

        failpoints.reach_step(self._step_label, failpoints.Moment.DONE)
        self._database.write(write)

    def _record_result(
        self, event: Event, amphora_id: str, change: Callable[[sa.Connection], object], detail: str | None = None
    ) -> None:
        """Record the result of a step, and its event in the history of fail-overs in progress."""
        now = self._database.now()

        def write(connection: sa.Connection) -> None:
            change(connection)
            if self._job.replacing:
                failovers.record_event(connection, self._lease.load_balancer_id, event, now, amphora_id, detail)

        self._write(write)

    def _read_amphora(self, amphora_id: str) -> Amphora:
        found = self._database.read(lambda connection: amphorae.load_amphorae(connection, self._lease.load_balancer_id))
        return next(one for one in found if one.id == amphora_id)

    # --- create an amphora ------------------------------------------------------------------------------------------

    def _record(self, step: planning.Record) -> None:
        amphora_id = str(uuid.uuid4())
        sealed = self._vault.seal(Secret(secrets.token_bytes(32)), amphorae.key_location(amphora_id))
        of, role = self._lease.load_balancer_id, step.role
        self._record_result(
            Event.RECORDED,
            amphora_id,
            lambda connection: amphorae.insert_amphora(connection, amphora_id, of, role, sealed),
        )

    def _boot(self, amphora: Amphora, view: planning.AnyView) -> None:
        key = self._database.read(lambda connection: amphorae.read_heartbeat_key(connection, self._vault, amphora.id))
        if key is None:
            raise ComputeError(f"boot amphora {amphora.id}", "it is not recorded")
        conf = render_agent_conf(
            amphora.id,
            port=self._conf.amp_agent.port,
            services=self._conf.amp_agent.services,
            heartbeat_interval=self._conf.amp_health.interval,
            heartbeat_targets=self._conf.amp_health.targets,
            audit_interval=self._conf.amp_drift.agent_interval,
        )
        profile = _machine_profile(view)
        self._job.ensure_may_act()
        identity, expires_at = self._issue_credentials(amphora)
        machine = self._compute.boot(
            BootRequest(
                amphora_id=amphora.id,
                load_balancer_id=amphora.load_balancer_id,
                flavor=profile.compute_flavor,
                zone=profile.compute_zone,
                image_tag=profile.image_tag,
                volume_zone=profile.volume_zone,
                management_network=profile.management_network,
                files={
                    "agent.conf": Secret(conf.encode()),
                    **identity,
                    "heartbeat.key": Secret(key.reveal().hex().encode()),
                },
            )
        )
        if machine.state is MachineState.FAILED:
            raise ComputeError(f"boot amphora {amphora.id}", machine.reason or "the machine failed")
        booted_at = amphora.booted_at or self._database.now()
        self._record_result(
            Event.BOOTED,
            amphora.id,
            lambda connection: amphorae.update_amphora(
                connection,
                amphora.id,
                compute_id=machine.compute_id,
                image=machine.image,
                management_address=machine.management_address,
                booted_at=booted_at,
                certificate_expires_at=expires_at,
            ),
        )

    def _issue_credentials(self, amphora: Amphora) -> tuple[dict[str, Secret], float]:
        """Return an amphora's certificate and its trusted CAs as files, and the expiry of the certificate."""
        given = self.renewal.issue_for_boot(amphora, exists=lambda: self._compute.get(amphora.id) is not None)
        if given is not None:
            credentials, issued = given
            client_ca, server_ca = credentials.client_ca, credentials.server_ca
        elif self._authority is None:
            raise CertificateError(f"issue the certificate of amphora {amphora.id}", "no certificate authority exists")
        else:
            options = self._conf.amp_certificates
            issued = self._authority.issue_server(amphora.id, options.validity_days)
            client_ca, server_ca = _read(options.client_ca), _read(options.ca_certificate)
        files = {
            "server.pem": issued.bundle(),
            "client_ca.pem": Secret(client_ca),
            "server_ca.pem": Secret(server_ca),
        }
        return files, issued.expires_at

    def _plug(self, step: planning.Plug, view: planning.LoadBalancerView) -> None:
        amphora = self._read_amphora(step.amphora_id)
        port = self._network.ensure_port(vip_allocation.request_port(step, view))
        self._job.ensure_may_act()
        try:
            self._compute.attach(amphora.id, port)
        except ComputeError:
            if amphora.state is AmphoraState.BOOTING:
                self._check_machine(amphora)
            raise
        subnets = tuple(
            self._network.subnet(subnet_id) for subnet_id in dict.fromkeys(one.subnet_id for one in port.addresses)
        )
        others = tuple(one for one in amphora.plugged if one.port.network_id != step.network_id)
        plugged = (*others, AttachedPort(port=port, subnets=subnets))
        self._write(lambda connection: amphorae.update_amphora(connection, amphora.id, plugged=plugged))

    def _await_agent(self, step: planning.AwaitAgent) -> None:
        """Query an agent once; the wait for a booting amphora uses neither this thread nor the lease."""
        amphora = self._read_amphora(step.amphora_id)
        if amphora.management_address is None:
            # The compute backend may assign the address later.
            self._check_boot_timeout(amphora, AgentUnreachable("reach it", "its management address is not known"))
            self.absent |= {amphora.id}
            return
        deadline = self._job.deadline.within(_FIRST_QUERY_TIMEOUT)
        try:
            self._agents.wait_until_ready(amphora.id, amphora.management_address, deadline)
        except AgentUnreachable as error:
            self._check_machine(amphora)
            self._check_boot_timeout(amphora, error)
            LOG.info("waiting for the agent of amphora %s: %s", amphora.id, error.happened)
            self.absent |= {amphora.id}
            return
        except (AgentRefused, AgentUntrusted) as error:
            # Another machine may have this address, for example an old one: a new boot may help.
            self._check_machine(amphora)
            self._check_boot_timeout(amphora, error)
            raise
        now = self._database.now()
        self._record_result(
            Event.READY,
            amphora.id,
            lambda connection: amphorae.update_amphora(connection, amphora.id, state=AmphoraState.READY, ready_at=now),
        )

    def _check_machine(self, amphora: Amphora) -> None:
        """Check that the machine runs; otherwise reset the amphora, so that the next job boots it again."""
        machine = self._compute.get(amphora.id)
        if machine is not None and machine.state is not MachineState.FAILED:
            return
        self._write(lambda connection: amphorae.update_amphora(connection, amphora.id, **_WITHOUT_MACHINE))
        reason = machine.reason if machine is not None else ""
        raise ComputeError(f"boot amphora {amphora.id}", reason or "its machine ended before the agent answered")

    def _check_boot_timeout(self, amphora: Amphora, error: AgentError) -> None:
        """Delete a machine whose agent exceeds the boot time-out; the next job boots it again."""
        most, now = float(self._conf.amp_controller.boot_timeout), self._database.now()
        if amphora.booted_at is None:
            self._write(lambda connection: amphorae.update_amphora(connection, amphora.id, booted_at=now))
        if (
            amphora.booted_at is None
            or now < amphora.booted_at + most
            or self._database.seconds_since_clock_jump() < most
        ):
            return
        self._job.ensure_may_act()
        self._compute.destroy(amphora.id)
        self._write(lambda connection: amphorae.update_amphora(connection, amphora.id, **_WITHOUT_MACHINE))
        happened = f"its agent has not answered in {most:g} s: {error.happened}"
        # The user has waited for the whole time-out: report ERROR now, before the next boot.
        raise ComputeError(f"boot amphora {amphora.id}", happened, final=True)

    def _query_vips(self, everyone: tuple[Amphora, ...]) -> None:
        self.vips_taken = self._push.query_vips_taken(everyone)

    # --- VIPs -------------------------------------------------------------------------------------------------------

    def _allocate_vip(self, view: planning.LoadBalancerView, by_id: dict[str, Amphora]) -> None:
        if view.tree is not None:
            machines = [one.compute_id for one in by_id.values() if one.compute_id]
            self._vip_steps.allocate(self._network, view.tree, view.network, view.generation, machines)

    def _apply_vip_options(self, view: planning.LoadBalancerView, by_id: dict[str, Amphora]) -> None:
        if view.tree is not None:
            self._vip_steps.apply(self._network, view.tree, tuple(by_id.values()), view.generation)

    def _hand_over(self, amphora: Amphora, partner: Amphora, view: planning.LoadBalancerView) -> None:
        ports = () if view.tree is None else vip_allocation.vip_ports(view.tree, (amphora, partner))
        self.removal.hand_over_vips(amphora, partner, keep_connections=self._network.redirect_allowed(ports))

    # --- remove an amphora ------------------------------------------------------------------------------------------

    def _unplug(self, amphora: Amphora, network_id: str) -> None:
        for plugged in amphora.plugged:
            if plugged.port.network_id == network_id:
                self._compute.detach(amphora.id, plugged.port)
                self._job.ensure_may_act()
                self._network.delete_port(plugged.port.id)
        left = tuple(one for one in amphora.plugged if one.port.network_id != network_id)
        self._write(lambda connection: amphorae.update_amphora(connection, amphora.id, plugged=left))

    def _release(self, amphora: Amphora, view: planning.AnyView) -> None:
        self.removal.delete_amphora(amphora, view, self._compute, self._network)

    def _bump_generation(self, view: planning.LoadBalancerView) -> None:
        self._write(lambda connection: generations.bump_generation(connection, view.load_balancer_id, view.generation))

    def _release_vip(self, view: planning.LoadBalancerView) -> None:
        self._network.release_load_balancer(view.load_balancer_id)
        self._push.confirm(view)


def _machine_profile(view: planning.AnyView) -> Profile:
    """Return the profile with the machine settings of the amphorae."""
    if isinstance(view, planning.SparePoolView):
        return view.stock.spec.profile()
    return Profile() if view.tree is None else view.tree.profile


def _no_such_step(step: planning.AnyStep, target: str) -> TypeError:
    return TypeError(f"{type(step).__name__} is not a step of a {target}")


def _describe(step: planning.AnyStep) -> str:
    what = {name: value for name, value in msgspec.structs.asdict(step).items() if name != "reason"}
    return f"{type(step).__name__} {what or ''} because {step.reason}"


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - one read of one option
        return file.read()
