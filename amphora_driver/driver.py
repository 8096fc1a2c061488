# SPDX-License-Identifier: Apache-2.0
"""The provider driver: translates, validates and records Octavia's calls.

Invariant: a call translates, validates, records the desired state and the job in one SQL transaction, notifies the
controllers and returns. It never waits for an amphora. It never calls Octavia, whose transaction is still open: a
status reported now would be lost. Its cost does not depend on the size of the load balancer. Unsupported options are
refused here by name.

Octavia creates a new instance for every request, so the module holds the shared state.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from octavia_lib.api.drivers import data_models, exceptions, provider_base
from oslo_config.cfg import ConfigOpts

from amphora_driver import config, failpoints
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.errors import (
    AmphoraDriverError,
    Conflict,
    ModelError,
    NetworkError,
    StoreError,
    UnknownObject,
    UnsupportedOption,
)
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import Listener, Node, Pool, without_addresses
from amphora_driver.model.network import VipRequest
from amphora_driver.model.secret_refs import SecretMaterial, SecretName
from amphora_driver.network.interface import NotYet
from amphora_driver.notifications import outbox
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket, notifier
from amphora_driver.resize import Resizer, ResizeTarget
from amphora_driver.store import desired_objects, vip_claims
from amphora_driver.store.failovers import Cause, FailoverTrigger
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location
from amphora_driver.validation import (
    availability_zones,
    certificates,
    cost_budget,
    flavors,
    options,
    pool_members,
    profile,
    udp,
)
from amphora_driver.validation.in_context import ContextCheck

LOG = logging.getLogger(__name__)
C = TypeVar("C")
F = TypeVar("F", bound="Callable[..., Any]")
_UNSPECIFIC = "The load balancer provider {}. Try again later, or tell the operator this reference: {}"
_VIP_KEYS = {f"vip_{name}": name for name in ("address", "network_id", "port_id", "subnet_id")}
_ADDITIONAL_VIP_KEYS = {"ip_address": "address"} | {name: name for name in ("network_id", "port_id", "subnet_id")}
_CHECKS: dict[Kind, Callable[[Any], None]] = {
    Kind.LOAD_BALANCER: options.check_loadbalancer,
    Kind.LISTENER: options.check_listener,
    Kind.POOL: options.check_pool,
    Kind.MEMBER: options.check_member,
    Kind.HEALTH_MONITOR: options.check_healthmonitor,
    Kind.L7POLICY: options.check_l7policy,
    Kind.L7RULE: options.check_l7rule,
}


def check_object(node: Node) -> None:
    """Refuse unsupported options of one object."""
    _CHECKS[desired_objects.kind_of(node)](node)
    if isinstance(node, Pool):
        pool_members.check_members_distinct(node)
        udp.check_monitor_type(node)
    elif isinstance(node, Listener):
        for policy in node.l7policies:
            options.check_policy_listener(policy, node)


class _Shared:
    """State that all instances of a process share, created at the first call."""

    def __init__(self, conf: ConfigOpts) -> None:
        self.conf = conf
        self.database = Database(conf.amp_database.connection)
        self.catalogue = Catalogue(conf, self.database)
        check = ContextCheck(conf, lambda name: self.catalogue.network(name).supports)
        announce = outbox.announce if conf.amp_notifications.enabled else outbox.announce_nothing
        self.recorder = RequestRecorder(self.database, check_object, check, announce)

    @functools.cached_property
    def vault(self) -> Vault:
        """The vault for users' secrets, loaded at its first use."""
        return Vault.load(self.conf.amp_database.encryption_key_file)

    def vip_network(self, load_balancer_id: str) -> tuple[str, bool]:
        """Return the network backend of a load balancer's VIPs, and whether it has allocated them."""

        def read(connection: sa.Connection) -> tuple[str | None, vip_claims.PendingVipRequest | None]:
            wish = vip_claims.read_pending_request(connection, load_balancer_id)
            return vip_claims.network_of_claim(connection, load_balancer_id), wish

        noted, wish = self.database.read(read)
        return noted or str(self.conf.amp_network.driver), wish is None


@functools.lru_cache(maxsize=1)
def _shared() -> _Shared:
    return _Shared(config.shared())


def _translate_errors(method: F) -> F:
    """Translate errors to those of octavia_lib, with texts for the user and for the operator."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with cost_budget.request_budget():
                return method(*args, **kwargs)
        except (UnsupportedOption, ModelError) as error:
            raise exceptions.UnsupportedOptionError(**_fault(error)) from error
        except Conflict as error:
            raise exceptions.Conflict(**_fault(error)) from error
        except UnknownObject as error:
            raise exceptions.NotFound(**_fault(error)) from error
        except AmphoraDriverError as error:
            # The user's error message contains a random reference. With the reference, an operator finds this log
            # message.
            reference = secrets.token_hex(4)
            text = "the driver could not execute the call %s of Octavia, and returned an error with reference %s"
            LOG.exception(text, method.__name__, reference)
            raise exceptions.DriverError(**_fault(error, reference)) from error

    return call  # type: ignore[return-value]


def _fault(error: AmphoraDriverError, reference: str = "") -> dict[str, str]:
    """Return the fault texts for the user and for the operator.

    A user receives the reference instead of the error, because errors of a database or another service name hosts,
    accounts and paths.
    """
    operator = f"{type(error).__name__}: {error}"
    if not reference or (isinstance(error, NetworkError) and error.final):
        return {"user_fault_string": str(error), "operator_fault_string": operator}
    happened = "could not use its database" if isinstance(error, StoreError) else "failed"
    user = _UNSPECIFIC.format(happened, reference)
    return {"user_fault_string": user, "operator_fault_string": f"{operator} (reference {reference})"}


def _translate_all_errors(driver: type[C]) -> type[C]:
    """Apply `_translate_errors` to every public method of a class."""
    for name, method in list(vars(driver).items()):
        if callable(method) and not name.startswith("_"):
            setattr(driver, name, _translate_errors(method))
    return driver


@_translate_all_errors
class AmphoraProviderDriver(provider_base.ProviderDriver):
    """The provider ``haproxy``; implements `ProviderDriver` of octavia_lib 3.12."""

    def create_vip_port(
        self,
        loadbalancer_id: str,
        project_id: str,
        vip_dictionary: dict[str, Any],
        additional_vip_dicts: list[dict[str, Any]] | None = None,
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Allocate the VIPs of a load balancer before its creation. Idempotent.

        Octavia calls this before the flavor is known, so the default network backend allocates. If the backend needs
        time, the user's request is returned without the unknown addresses and ports; the controller continues.
        """
        given = [(vip_dictionary, _VIP_KEYS), *((one, _ADDITIONAL_VIP_KEYS) for one in additional_vip_dicts or ())]
        vips = tuple(VipRequest(**{ours: one.get(key) for key, ours in keys.items()}) for one, keys in given)
        shared = _shared()
        name = shared.database.write(
            lambda connection: vip_claims.record_claim(connection, loadbalancer_id, shared.conf.amp_network.driver)
        )
        failpoints.reach(failpoints.Point.CLAIM_NOTED)
        wish = vip_claims.PendingVipRequest(project_id=project_id, vips=vips, since=shared.database.now())
        found = shared.catalogue.network(name).allocate_vip(loadbalancer_id, project_id, wish.vips)
        failpoints.reach(failpoints.Point.ADDRESSES_TAKEN)
        if isinstance(found, NotYet):
            later = vip_claims.schedule_retry(wish, found.reason, found.again_in, shared.database.now())
            shared.database.write(
                lambda connection: vip_claims.write_pending_request(connection, loadbalancer_id, name, later)
            )
        first, *others = wish.vips if isinstance(found, NotYet) else found
        answer = {**vip_dictionary, **{key: getattr(first, ours) for key, ours in _VIP_KEYS.items()}}
        return answer, [{key: getattr(one, ours) for key, ours in _ADDITIONAL_VIP_KEYS.items()} for one in others]

    def loadbalancer_create(self, loadbalancer: data_models.LoadBalancer) -> None:
        """Create a load balancer, alone or fully populated.

        Octavia passes a fully populated load balancer without its L7 policies and with half of its nested lists. The
        provider agent reads it from Octavia after Octavia's commit.
        """
        shared = _shared()
        network, answered = shared.vip_network(from_octavia.get_id(Kind.LOAD_BALANCER, loadbalancer))
        try:
            flavor, zone = (from_octavia.get_value(loadbalancer, name) for name in ("flavor", "availability_zone"))
            chosen = profile.choose_profile(flavor, zone, shared.catalogue.deployment(), vip_network=network)
            tree = msgspec.structs.replace(from_octavia.load_balancer(loadbalancer), profile=chosen)
            tree = tree if answered else without_addresses(tree)
            # The provider agent later reads the secrets of a new load balancer from Octavia. So this call validates the
            # secrets and does not store them.
            certificates.prepare_secrets(from_octavia.read_secrets(Kind.LOAD_BALANCER, loadbalancer))
            availability_zones.check_zone_vips(zone, tree.vips)
            shared.recorder.create_load_balancer(tree, read_back=bool(tree.listeners or tree.pools))
        except StoreError:
            # After a StoreError, the database may contain the load balancer, so its VIP addresses stay reserved.
            # Housekeeping releases the addresses if the load balancer is not in the database.
            raise
        except AmphoraDriverError:
            # After any other error, the database does not contain the load balancer, and Octavia gives up the creation.
            # So its VIP addresses are not needed.
            shared.catalogue.network(network).release_load_balancer(
                from_octavia.get_id(Kind.LOAD_BALANCER, loadbalancer)
            )
            raise
        _notify(tree.id)

    def loadbalancer_delete(self, loadbalancer: data_models.LoadBalancer, cascade: bool = False) -> None:
        """Delete a load balancer with all children. Without `cascade` Octavia has checked that it has none."""
        load_balancer_id = from_octavia.get_id(Kind.LOAD_BALANCER, loadbalancer)
        _shared().recorder.delete_load_balancer(load_balancer_id)
        _notify(load_balancer_id)

    def loadbalancer_failover(self, loadbalancer_id: str) -> None:
        """Replace every amphora of a load balancer."""
        _shared().recorder.fail_over(loadbalancer_id)
        _notify(loadbalancer_id)

    def loadbalancer_failover_with_flavor(self, loadbalancer_id: str, flavor_id: str | Mapping[str, object]) -> None:
        """Resize a load balancer: replace its amphorae according to another flavor. The zone stays.

        Octavia 19 does not call this method. octavia_lib 3.12 declares the id of a flavor as the argument, but has no
        function that reads a flavor. The method therefore needs the metadata of the flavor, in the form in which
        `loadbalancer_create` gets it, and refuses an id. Every listener and pool is checked, so the cost depends on the
        size of the load balancer.
        """
        if not isinstance(flavor_id, Mapping):
            raise UnsupportedOption(
                f"fail over load balancer {loadbalancer_id} to flavor {flavor_id}",
                "a provider driver cannot read the metadata of a flavor by its id",
                "An operator can resize it: amphoractl loadbalancer resize ID --flavor JSON.",
            )
        shared = _shared()
        trigger = FailoverTrigger(cause=Cause.RESIZE, reason="Octavia requested another flavor")
        chosen = ResizeTarget(flavor=flavor_id, trigger=trigger)
        Resizer(shared.conf, shared.database, shared.catalogue).record(loadbalancer_id, chosen, pending=True)
        _notify(loadbalancer_id)

    def loadbalancer_update(
        self, old_loadbalancer: data_models.LoadBalancer, new_loadbalancer: data_models.LoadBalancer
    ) -> None:
        self._update(Kind.LOAD_BALANCER, new_loadbalancer)

    def listener_create(self, listener: data_models.Listener) -> None:
        self._create(Kind.LISTENER, listener)

    def listener_update(self, old_listener: data_models.Listener, new_listener: data_models.Listener) -> None:
        self._update(Kind.LISTENER, new_listener)

    def listener_delete(self, listener: data_models.Listener) -> None:
        self._delete(Kind.LISTENER, listener)

    def pool_create(self, pool: data_models.Pool) -> None:
        """Create a pool, which becomes the default pool of the listener that the call names."""
        self._create(Kind.POOL, pool, for_listener=from_octavia.get_value(pool, "listener_id") or None)

    def pool_update(self, old_pool: data_models.Pool, new_pool: data_models.Pool) -> None:
        self._update(Kind.POOL, new_pool)

    def pool_delete(self, pool: data_models.Pool) -> None:
        self._delete(Kind.POOL, pool)

    def member_create(self, member: data_models.Member) -> None:
        self._create(Kind.MEMBER, member)

    def member_update(self, old_member: data_models.Member, new_member: data_models.Member) -> None:
        self._update(Kind.MEMBER, new_member)

    def member_delete(self, member: data_models.Member) -> None:
        self._delete(Kind.MEMBER, member)

    def member_batch_update(self, pool_id: str, members: Sequence[data_models.Member]) -> None:
        """Replace the members of a pool by exactly these; known members have only their changed fields."""
        ids = [from_octavia.get_id(Kind.MEMBER, one) for one in members]
        builders = [functools.partial(_member_of, pool_id, one) for one in members]
        fields = [from_octavia.changed_fields(Kind.MEMBER, one) for one in members]
        _notify(_shared().recorder.set_members(pool_id, list(zip(ids, builders, fields, strict=True))))

    def health_monitor_create(self, healthmonitor: data_models.HealthMonitor) -> None:
        self._create(Kind.HEALTH_MONITOR, healthmonitor)

    def health_monitor_update(
        self, old_healthmonitor: data_models.HealthMonitor, new_healthmonitor: data_models.HealthMonitor
    ) -> None:
        self._update(Kind.HEALTH_MONITOR, new_healthmonitor)

    def health_monitor_delete(self, healthmonitor: data_models.HealthMonitor) -> None:
        self._delete(Kind.HEALTH_MONITOR, healthmonitor)

    def l7policy_create(self, l7policy: data_models.L7Policy) -> None:
        self._create(Kind.L7POLICY, l7policy)

    def l7policy_update(self, old_l7policy: data_models.L7Policy, new_l7policy: data_models.L7Policy) -> None:
        self._update(Kind.L7POLICY, new_l7policy)

    def l7policy_delete(self, l7policy: data_models.L7Policy) -> None:
        self._delete(Kind.L7POLICY, l7policy)

    def l7rule_create(self, l7rule: data_models.L7Rule) -> None:
        self._create(Kind.L7RULE, l7rule)

    def l7rule_update(self, old_l7rule: data_models.L7Rule, new_l7rule: data_models.L7Rule) -> None:
        self._update(Kind.L7RULE, new_l7rule)

    def l7rule_delete(self, l7rule: data_models.L7Rule) -> None:
        self._delete(Kind.L7RULE, l7rule)

    def get_supported_flavor_metadata(self) -> dict[str, str]:
        return flavors.list_supported_keys(_shared().catalogue.deployment())

    def validate_flavor(self, flavor_metadata: dict[str, Any]) -> None:
        catalogue = _shared().catalogue
        checked = flavors.validate_metadata(flavor_metadata, catalogue.deployment())
        catalogue.validate_profile(checked, checked.get("compute_driver"), checked.get("network_driver"))

    def get_supported_availability_zone_metadata(self) -> dict[str, str]:
        return availability_zones.list_supported_keys(_shared().catalogue.deployment())

    def validate_availability_zone(self, availability_zone_metadata: dict[str, Any]) -> None:
        catalogue = _shared().catalogue
        catalogue.validate_profile(
            availability_zones.validate_metadata(availability_zone_metadata, catalogue.deployment())
        )

    def _create(self, kind: Kind, source: object, *, for_listener: str | None = None) -> None:
        # octavia-lib returns SNI certificates in any order, so the driver cannot match them with references by position
        # (`paired=False`).
        contents = _validate_and_seal(from_octavia.read_secrets(kind, source, paired=False))
        node = from_octavia.node(kind, source)
        _notify(_shared().recorder.create_object(kind, node, for_listener=for_listener, contents=contents))

    def _update(self, kind: Kind, new: object) -> None:
        contents = _validate_and_seal(from_octavia.read_secrets(kind, new))
        fields = from_octavia.changed_fields(kind, new)
        _notify(_shared().recorder.update_object(kind, from_octavia.get_id(kind, new), fields, contents=contents))

    def _delete(self, kind: Kind, source: object) -> None:
        _notify(_shared().recorder.delete_object(kind, from_octavia.get_id(kind, source)))


def _validate_and_seal(given: Mapping[SecretName, SecretMaterial]) -> dict[SecretName, SealedSecret]:
    """Validate the secrets and return them sealed for the database."""
    if not given:
        return {}
    vault, prepared = _shared().vault, certificates.prepare_secrets(given)
    return {name: SealedSecret(content=vault.seal(one, secret_location(name))) for name, one in prepared.items()}


def _member_of(pool_id: str, source: data_models.Member) -> Any:
    """Return a new member of a batch; it may lack the id of the batch's pool."""
    source.pool_id = pool_id
    return from_octavia.member(source)


def _notify(load_balancer_id: str) -> None:
    """Notify the controllers of the job, and the reporters of a new status."""
    failpoints.reach(failpoints.Point.INTENT_COMMITTED)
    conf = _shared().conf
    notifier.notify(conf, local_socket.CONTROLLER, load_balancer_id)
    notifier.notify(conf, local_socket.REPORTER)
