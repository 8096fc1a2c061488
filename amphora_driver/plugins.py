# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of a deployment: topologies, compute and network backends, loaded by entry point.

Invariant: a backend is imported at its first use and created once in each process. A backend that cannot be loaded
fails only the operations that need it. Several backends of one kind may be active, and each caller names one, because a
load balancer keeps the backends of its creation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from oslo_config.cfg import ConfigOpts

from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError, ConfigurationError
from amphora_driver.installation import find_plugins
from amphora_driver.model.enums import Topology as Name
from amphora_driver.network.interface import Network
from amphora_driver.topology import Topology
from amphora_driver.validation.backend_capabilities import Backend, Deployment

LOG = logging.getLogger(__name__)
TOPOLOGY, COMPUTE, NETWORK = (f"amphora_driver.{kind}" for kind in ("topology", "compute", "network"))


class Catalogue:
    """Topologies, compute and network backends."""

    def __init__(self, conf: ConfigOpts, database: Database) -> None:
        self._conf = conf
        self._database = database
        self._lock = threading.RLock()
        self._types: dict[tuple[str, str], Any] = {}
        self._made: dict[tuple[str, ...], Any] = {}
        self._topologies: tuple[str, ...] | None = None

    def topology(self, name: str) -> Topology:
        """Return a topology; raise `ConfigurationError` if no topology of this name is installed."""
        return cast("Topology", self._type(TOPOLOGY, name))

    def network(self, name: str | None) -> Network:
        """Return a network backend (None: the default one); raise `ConfigurationError` if it is not usable."""
        chosen = name or self._conf.amp_network.driver
        kind = self._enabled("network", chosen)
        made = self._once((kind, chosen), lambda: self._type(kind, chosen)(self._conf, self._database))
        return cast("Network", made)

    def compute(self, name: str | None, network: str | None) -> Any:
        """Return a compute backend that uses ports of this network backend; see `network`."""
        chosen, source = name or self._conf.amp_compute.driver, network or self._conf.amp_network.driver
        kind = self._enabled("compute", chosen)
        ports = self.network(source)
        return self._once((kind, chosen, source), lambda: self._type(kind, chosen)(self._conf, ports))

    def validate_profile(self, metadata: Mapping[str, object], compute: object = None, network: object = None) -> None:
        """Check that the objects of a flavor's or availability zone's metadata exist in the cloud.

        Raises:
            UnsupportedOption: an object does not exist.
            BackendError: the backend could not check the metadata.
        """
        name = compute if isinstance(compute, str) else None
        self.compute(name, network if isinstance(network, str) else None).validate_profile(metadata)

    def networks(self) -> dict[str, Network]:
        """Return all enabled network backends that can be loaded, by name."""
        return self._all("network", self.network)

    def computes(self) -> dict[str, Any]:
        """Return all enabled compute backends that can be loaded, each with a compatible network backend."""

        def with_network(name: str) -> Any:
            wiring = self._type(COMPUTE, name).wiring
            names = (one for one in self._names("network") if self._type(NETWORK, one).wiring == wiring)
            return self.compute(name, next(names, None))

        return self._all("compute", with_network)

    def _all(self, group: str, get: Callable[[str], Any]) -> dict[str, Any]:
        found = {}
        for name in self._names(group):
            try:
                found[name] = get(name)
            except (ConfigurationError, AttributeError) as error:
                LOG.warning(
                    "this process continues without the %s backend %s, which failed to load: %s", group, name, error
                )
        return found

    def deployment(self) -> Deployment:
        """Return the topologies and backends that users can choose; omit the ones that cannot be loaded."""
        options = self._conf.amp_haproxy
        if self._topologies is None:
            self._topologies = tuple(self._find_topologies())
        return Deployment(
            topologies=self._topologies,
            compute=self._offered("compute"),
            network=self._offered("network"),
            default_topology=Name(self._conf.amp_controller.loadbalancer_topology),
            default_compute=self._conf.amp_compute.driver,
            default_network=self._conf.amp_network.driver,
            process_connection_limit=options.process_connection_limit,
            tls_minimum_version=options.tls_minimum_version,
            tls_ciphers=options.tls_ciphers,
            connection_logging=options.connection_logging,
            log_authorities=bool(self._conf.amp_logs.ca_certificate),
        )

    def _find_topologies(self) -> Iterator[str]:
        for name in sorted({one.name for one in find_plugins(TOPOLOGY)}):
            try:
                self.topology(name)
            except ConfigurationError as error:
                text = "the driver cannot load the topology %s, so users cannot choose it: %s"
                LOG.error(text, name, error)  # noqa: TRY400 - the message is complete
            else:
                yield name

    def _offered(self, group: str) -> dict[str, Backend]:
        found = {}
        for name in self._names(group):
            try:
                backend = self._type(f"amphora_driver.{group}", name)
                found[name] = Backend(name=name, supports=frozenset(backend.supports), wiring=backend.wiring)
            except (ConfigurationError, AttributeError) as error:
                text = "the driver cannot load the %s backend %s, so users cannot choose the backend: %s"
                LOG.error(text, group, name, error)  # noqa: TRY400 - the message is complete
        return found

    def _names(self, group: str) -> list[str]:
        """Return the names of the enabled backends, always including the default."""
        options = self._conf[f"amp_{group}"]
        return list(dict.fromkeys([options.driver, *options.enabled_drivers]))

    def _enabled(self, group: str, name: str) -> str:
        if name not in self._names(group):
            raise ConfigurationError(
                f"use the {group} backend {name}",
                "it is not enabled in this deployment",
                f"Add it to [amp_{group}] enabled_drivers while load balancers use it.",
            )
        return f"amphora_driver.{group}"

    def _type(self, group: str, name: str) -> Any:
        """Return the class of an entry point."""
        with self._lock:
            if (group, name) not in self._types:
                self._types[group, name] = _load(group, name)
            return self._types[group, name]

    def _once(self, key: tuple[str, ...], make: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._made:
                try:
                    self._made[key] = make()
                except AmphoraDriverError:
                    raise
                except Exception as error:
                    raise ConfigurationError(f"use the backend {key[1]} ({key[0]})", _words(error)) from error
            return self._made[key]


def _load(group: str, name: str) -> Any:
    wanted = f"use {name} ({group})"
    found = {one.value: one for one in find_plugins(group) if one.name == name}
    if not found:
        remedy = f"Install the package that provides it, or correct {group}."
        raise ConfigurationError(wanted, "no entry point of this name is installed", remedy)
    if len(found) > 1:
        happened = f"several packages provide it: {', '.join(sorted(found))}"
        raise ConfigurationError(wanted, happened, "Remove all but one.")
    try:
        return next(iter(found.values())).load()
    except AmphoraDriverError:
        raise
    except Exception as error:
        raise ConfigurationError(wanted, _words(error), "Install its dependencies.") from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
