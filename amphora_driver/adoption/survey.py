# SPDX-License-Identifier: Apache-2.0
"""Reads everything that the plan of an adoption needs, and plans.

Invariant: a survey changes nothing, in Octavia and in the database of this provider.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from octavia_lib.api.drivers import exceptions as octavia_errors
from octavia_lib.api.drivers.driver_lib import DriverLibrary

from amphora_driver.adoption import planner
from amphora_driver.adoption.octavia_state import OctaviaState
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.adoption.planner import Circumstances, Plan
from amphora_driver.database.tables import job
from amphora_driver.driver import check_object
from amphora_driver.errors import ConfigurationError, ModelError, OctaviaError, RequestError, UnknownObject
from amphora_driver.model import from_octavia
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.model.secret_refs import SecretName, secrets_of_tree
from amphora_driver.provider_agent.octavia_reader import UNREADABLE, OctaviaReader
from amphora_driver.store import desired_objects
from amphora_driver.store.sealed_secrets import SealedSecret
from amphora_driver.validation import profile
from amphora_driver.validation.in_context import ContextCheck

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.plugins import Catalogue

_TOPOLOGY = "loadbalancer_topology"
_SOCKETS = ("status_socket", "stats_socket", "get_socket")
_FAILED = (
    octavia_errors.DriverAgentNotFound,
    octavia_errors.DriverAgentTimeout,
    octavia_errors.UpdateStatusError,
    OSError,
)


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """A load balancer of Octavia's provider, with its plan.

    Attributes:
        state: Octavia's rows.
        tree: the model, with the profile that this provider gives it.
        contents: the encrypted secrets.
        plan: the actions or the refusals.
    """

    state: OctaviaState
    tree: LoadBalancer
    contents: dict[SecretName, SealedSecret]
    plan: Plan


class Surveyor:
    """Reads load balancers and plans their adoption.

    Args:
        conf: the options of the driver.
        database: the database of the driver.
        catalogue: the backends.
        octavia: Octavia's database.
        library: returns the connection to octavia-driver-agent.
    """

    def __init__(
        self,
        conf: ConfigOpts,
        database: Database,
        catalogue: Catalogue,
        octavia: OctaviaDatabase,
        library: Callable[[], DriverLibrary],
    ) -> None:
        self._conf = conf
        self._database = database
        self._catalogue = catalogue
        self._octavia = octavia
        self._library = library
        self._reader = OctaviaReader(conf, database, library)
        self._check_fit = ContextCheck(conf, lambda name: catalogue.network(name).supports)

    def survey(self, load_balancer_id: str, remove_after: float) -> Survey:
        """Return a load balancer with its plan.

        Raises:
            UnknownObject: Octavia does not know the load balancer.
            AmphoraDriverError: Octavia does not answer, or the model does not know a value.
        """
        state = self._octavia.read(load_balancer_id)
        if state is None:
            raise UnknownObject(f"adopt load balancer {load_balancer_id}", "Octavia does not know it, or deletes it")
        recorded = self._database.read(
            lambda c: c.execute(sa.select(job.c.op).where(job.c.load_balancer_id == load_balancer_id)).first()
        )
        tree, contents = self.read_tree(state)
        around = Circumstances(
            provider=self._conf.amp_octavia.provider,
            network=str(tree.profile.network or self._conf.amp_network.driver),
            recorded=recorded is not None,
            remove_after=remove_after,
            objections=tuple(self._objections(tree, contents)),
        )
        return Survey(state=state, tree=tree, contents=contents, plan=planner.plan(state, tree, around))

    def read_tree(self, state: OctaviaState) -> tuple[LoadBalancer, dict[SecretName, SealedSecret]]:
        """Return the model of a load balancer and its encrypted secrets.

        The flavor of Octavia's provider does not apply: its compute flavor and image are those of its own amphorae.
        Only the topology stays.
        """
        found = self._read(state.load_balancer_id)
        contents = self._reader.seal_secrets(from_octavia.read_secrets(Kind.LOAD_BALANCER, found))
        deployment = self._catalogue.deployment()
        flavor = {_TOPOLOGY: state.topology} if state.topology in deployment.topologies else {}
        chosen = profile.choose_profile(flavor, None, deployment)
        tree = from_octavia.load_balancer(found)
        return msgspec.structs.replace(tree, profile=chosen, flavor=flavor or None, availability_zone=None), contents

    def _read(self, load_balancer_id: str) -> Any:
        attempt = f"read load balancer {load_balancer_id} from Octavia"
        try:
            found = self._library().get_loadbalancer(load_balancer_id)
        except octavia_errors.DriverAgentTimeout as error:
            raise ModelError(attempt, UNREADABLE) from error
        except (octavia_errors.DriverAgentNotFound, octavia_errors.DriverError, OSError) as error:
            raise OctaviaError(attempt, str(error), "Check [amp_octavia] get_socket.") from error
        if found is None:
            raise UnknownObject(attempt, "Octavia does not know it")
        return found

    def _objections(self, tree: LoadBalancer, contents: dict[SecretName, SealedSecret]) -> list[str]:
        """Return the refusals of the provider driver, and the secrets without a usable content."""
        found = []
        for node in desired_objects.iter_subtree(tree):
            try:
                check_object(node)
                self._check_fit(node, tree)
            except (RequestError, ModelError) as error:
                found.append(f"{desired_objects.kind_of(node).value[:-1]} {node.id}: {error}")
        for name in secrets_of_tree(tree):
            kept = contents.get(name)
            if kept is None or kept.content is None:
                reason = "Octavia returns no content" if kept is None else kept.reason
                found.append(f"the {name.purpose.value} of {name.object_id} is not usable: {reason}")
        return found


def missing_sockets(conf: ConfigOpts) -> list[str]:
    """Return the options and paths of the sockets of octavia-driver-agent that do not exist."""
    paths = {name: str(conf.amp_octavia[name]) for name in _SOCKETS}
    return [f"[amp_octavia] {name} = {path}" for name, path in paths.items() if not Path(path).exists()]


def connect_library(conf: ConfigOpts) -> DriverLibrary:
    """Return the connection to octavia-driver-agent.

    octavia-lib waits two minutes for a missing socket. So this function raises `ConfigurationError` at once.
    """
    if missing := missing_sockets(conf):
        raise ConfigurationError(
            "connect to octavia-driver-agent",
            f"a socket does not exist: {', '.join(missing)}",
            "Run this on a host with octavia-driver-agent.",
        )
    return DriverLibrary(**{name: str(conf.amp_octavia[name]) for name in _SOCKETS})


def set_status(library: DriverLibrary, load_balancer_id: str, status: str) -> None:
    """Set the provisioning status of a load balancer in Octavia."""
    try:
        library.update_loadbalancer_status({"loadbalancers": [{"id": load_balancer_id, "provisioning_status": status}]})
    except _FAILED as error:
        raise OctaviaError(f"set load balancer {load_balancer_id} {status} in Octavia", str(error)) from error
