# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections to the services of an OpenStack cloud.

Invariant: a connection is made at its first use and kept for the life of the process. No request waits longer than the
time-out of its connection or the deadline of the current operation, and no request is repeated here: the callers have
their own back-off. The options of keystoneauth come from [amp_openstack], or from the file `octavia_config`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from amphora_driver.deadline import limit_wait
from amphora_driver.errors import AmphoraDriverError, ConfigurationError, NetworkError
from amphora_driver.openstack.errors import ApiError, transport_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oslo_config.cfg import ConfigOpts

GROUP = "amp_openstack"
_WANTED = "connect to OpenStack"
# Version at the end of a service's address (endpoint), by kind of service.
_VERSIONS = {"network": "v2.0", "load_balancer": "v2"}


class Service:
    """One service of the cloud, for example Neutron. Its methods are safe for threads.

    Args:
        conf: our options.
        kind: the name of the service in openstacksdk: `network`, `compute`, `image` or `load_balancer`.
        octavia_group: the group of octavia.conf with options of this service, for `octavia_config`.
        timeout: seconds that a request waits for a connection, and for each part of the answer.
    """

    def __init__(self, conf: ConfigOpts, kind: str, octavia_group: str, timeout: float) -> None:
        self._conf = conf
        self._kind = kind
        self._octavia_group = octavia_group
        self._timeout = timeout
        self._lock = threading.Lock()
        self._adapter: Any = None

    def project_id(self) -> str:
        """Return the project of the service account.

        Raises:
            AmphoraDriverError: the cloud does not authenticate the account.
        """
        adapter = self._connected()
        try:
            found = adapter.session.get_project_id()
        except Exception as error:
            raise _failed(error, "authenticate the service account") from error
        if not found:
            raise ConfigurationError(_WANTED, "the service account has no project", "Set project_name.")
        return str(found)

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Sequence[tuple[str, str]] = (),
        json: object = None,
        headers: Mapping[str, str] | None = None,
        secret: bool = False,
    ) -> Any:
        """Send one request; return the decoded answer, None without a body.

        Args:
            method: the HTTP method.
            path: the path below the endpoint.
            params: the parameters of the query.
            json: the body.
            headers: further headers.
            secret: request or answer have secrets, so keystoneauth must not log them, not even for debugging.

        Raises:
            ApiError: the service refuses the request.
            NetworkError: the service does not answer, or fails.
            DeadlinePassed: the operation of this thread has no time left.
        """
        adapter = self._connected()
        more: dict[str, Any] = {} if json is None else {"json": json}
        if secret:
            more["log"] = False
        try:
            answer = adapter.request(
                path,
                method,
                params=list(params),
                headers=dict(headers or {}),
                raise_exc=False,
                connect_retries=0,
                **more,
            )
        except Exception as error:
            raise _failed(error, f"{method} {path}") from error
        if answer.status_code >= 400:
            raise ApiError.of(method, path, answer.status_code, answer.text)
        try:
            return answer.json() if answer.content else None
        except ValueError as error:
            raise NetworkError(f"{method} {path}", f"the answer is not JSON: {answer.text[:100]!r}") from error

    def _connected(self) -> Any:
        with self._lock:
            if self._adapter is None:
                try:
                    self._adapter = self._connect()
                except Exception as error:
                    raise _failed(error, _WANTED) from error
            return self._adapter

    def _connect(self) -> Any:
        # The imports are inside the method, because they take a second, and octavia-api may never connect to OpenStack.
        from keystoneauth1 import exceptions, loading  # noqa: PLC0415
        from openstack.connection import Connection  # noqa: PLC0415

        conf, groups = self._source()
        auth: Any = None
        for group in groups:
            loading.register_auth_conf_options(conf, group)
            loading.register_session_conf_options(conf, group)
            try:
                auth = loading.load_auth_from_conf_options(conf, group)
            except exceptions.MissingRequiredOptions:
                if group == groups[-1]:
                    raise
            if auth is not None:
                break
        if auth is None:
            raise ConfigurationError(
                _WANTED, f"[{groups[-1]}] auth_type is not set", "Set the options of keystoneauth."
            )
        session = loading.load_session_from_conf_options(conf, group, auth=auth, session=_http(self._timeout))
        adapter = getattr(Connection(session=session, **self._endpoint(conf, groups[0])), self._kind)
        version = _VERSIONS.get(self._kind)
        if version and adapter.endpoint_override:
            # The driver adds the version to the address. Otherwise, openstacksdk asks the service for the version only
            # once; without an answer, all later requests fail with status 404.
            adapter.endpoint_override = f"{_without_version(adapter.endpoint_override)}/{version}"
        return adapter

    def _source(self) -> tuple[ConfigOpts, tuple[str, ...]]:
        """Return the options and the groups that may hold the account, the preferred one first."""
        path = self._conf[GROUP].octavia_config
        if not path:
            return self._conf, (GROUP,)
        from oslo_config import cfg  # noqa: PLC0415 - only this case needs it

        conf = cfg.ConfigOpts()
        try:
            conf([], project="octavia", default_config_files=[path], default_config_dirs=[])
        except cfg.Error as error:
            raise ConfigurationError("read [amp_openstack] octavia_config", str(error), f"Check {path}.") from error
        return conf, (self._octavia_group, "service_auth")

    def _endpoint(self, conf: ConfigOpts, group: str) -> dict[str, Any]:
        """Return region, interface and address of the service, for the SDK."""
        own = self._conf[GROUP]
        region, interface, address = own.region_name, own.interface, own[f"{self._kind}_endpoint_override"]
        if conf is not self._conf:
            from keystoneauth1 import loading  # noqa: PLC0415

            loading.register_adapter_conf_options(conf, group, include_deprecated=False)
            theirs = conf[group]
            region = region or theirs.region_name
            interface = interface or next(iter(theirs.valid_interfaces or ()), None)
            address = address or theirs.endpoint_override
        if address and self._kind == "load_balancer":
            # Octavia lists its API versions only at the address without a version part, so the driver removes this
            # part.
            address = _without_version(address)
        values = {"region_name": region, "interface": interface, f"{self._kind}_endpoint_override": address}
        return {name: value for name, value in values.items() if value}


def _without_version(address: str) -> str:
    return address.rstrip("/").removesuffix("/v2.0").removesuffix("/v2")


def has_account(conf: ConfigOpts) -> bool:
    """Whether an account is configured; False without keystoneauth, which only an OpenStack cloud needs."""
    if conf[GROUP].octavia_config:
        return True
    if not _names_account(conf):
        return False
    try:
        from keystoneauth1 import loading  # noqa: PLC0415 - a slow import
    except ImportError:
        return False
    loading.register_auth_conf_options(conf, GROUP)
    return bool(conf[GROUP].auth_type)


def _names_account(conf: ConfigOpts) -> bool:
    """Whether the files of the configuration have an option that keystoneauth needs for any account."""
    from oslo_config import cfg  # noqa: PLC0415 - octavia-api may never need it

    # keystoneauth refuses to register these options a second time, so an object of its own reads them.
    own = cfg.ConfigOpts()
    own.register_opts([cfg.StrOpt("auth_type", deprecated_name="auth_plugin"), cfg.StrOpt("auth_section")], group=GROUP)
    own([], project="amphora-driver", default_config_files=conf.config_file, default_config_dirs=conf.config_dir)
    return bool(own[GROUP].auth_type or own[GROUP].auth_section)


def _http(timeout: float) -> Any:
    """Return an HTTP session whose requests end at the deadline of the operation."""
    from keystoneauth1.session import TCPKeepAliveAdapter  # noqa: PLC0415
    from requests import Session  # noqa: PLC0415

    class Limited(TCPKeepAliveAdapter):
        """Applies the time-out to each request, also to those for tokens."""

        def send(self, *words: Any, **options: Any) -> Any:
            return super().send(*words, **{**options, "timeout": limit_wait(timeout)})

    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Limited())
    return session


def _failed(error: Exception, wanted: str) -> AmphoraDriverError:
    if isinstance(error, ImportError):
        return ConfigurationError(wanted, str(error), "Install the extra [openstack] of this package.")
    return error if isinstance(error, AmphoraDriverError) else transport_error(error, wanted)
