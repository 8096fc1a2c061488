# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections to Octavia, Nova and Heat.

Invariant: each request has the token of the group's own application credential. This service has no account, so its
rights cannot act on a user's objects. No request waits longer than the time-out or the deadline of the current
operation. Only a read whose connection fails is repeated, once: the server may have closed an idle connection at this
moment. The controller has its own back-off.

Without Keystone (option `without_keystone`), a request has no token. It names the project of the group in the header
`X-Project-Id`. The services of such a cloud trust each client that reaches them: any process can act for any project,
and the owner of a group is not verified. This is acceptable for services on the loopback of a test machine only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import Any, TypeVar

import msgspec

from amphora_cluster.cloud.errors import CloudError, no_answer, translate
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.credential import ApplicationCredential
from amphora_driver.deadline import limit_wait
from amphora_driver.errors import AmphoraDriverError, ConfigurationError
from amphora_driver.openstack.errors import ApiError

T = TypeVar("T")

_KINDS = {"octavia": "load-balancer", "nova": "compute", "heat": "orchestration"}
_POOL_SIZE = 32
_PROJECT_HEADER = "X-Project-Id"
_lock = threading.Lock()
# HTTP sessions of this process, by time-out in seconds.
_http_sessions: dict[float, Any] = {}


class CloudConnection:
    """The services of the cloud, for one owner of groups. Its methods are safe for threads.

    Args:
        settings: how to reach the services.
        credential: the owner's application credential; None without Keystone.
        project_id: the owner's project.

    Attributes:
        calls: number of requests by method and service, for tests and metrics. Tokens are not counted.
    """

    def __init__(self, settings: CloudSettings, credential: ApplicationCredential | None, project_id: str) -> None:
        self.settings = settings
        self.project_id = project_id
        self.calls: Counter[tuple[str, str]] = Counter()
        self._credential = credential
        self._lock = threading.Lock()
        self._session: Any = None
        self._adapters: dict[str, Any] = {}

    def request(
        self,
        service: str,
        method: str,
        path: str,
        *,
        kind: type[T],
        wanted: str,
        params: Sequence[tuple[str, str]] = (),
        body: object = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Send one request; return the decoded answer.

        Args:
            service: `octavia`, `nova` or `heat`.
            method: the HTTP method.
            path: the path below the endpoint.
            kind: the type of the answer; `None` for an answer without a body.
            wanted: the purpose of the request, as an infinitive, for the error.
            params: the parameters of the query.
            body: the body of the request, sent as JSON.
            headers: further headers.

        Raises:
            CloudError: the service refuses the request, does not answer, or sends no valid answer.
            ConfigurationError: the service has no endpoint.
            DeadlinePassed: the operation of this thread has no time left.
        """
        more = {} if body is None else {"json": body}
        more |= {"params": list(params), "headers": {**self._project(), **(headers or {})}}
        with _translated(wanted):
            answer = self._send(service, method, path, more, repeat=method == "GET")
        self.calls[method, service] += 1
        if answer.status_code >= 400:
            raise translate(_refusal(method, path, answer), wanted)
        if kind is type(None):
            return None
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise CloudError(wanted, f"the answer to {method} {path} is not valid: {error}") from error

    def _send(self, service: str, method: str, path: str, more: dict[str, Any], *, repeat: bool) -> Any:
        from keystoneauth1 import exceptions  # noqa: PLC0415

        try:
            # keystoneauth's log would contain all answers and slow each request down, so it is disabled.
            return self._adapter(service).request(path, method, raise_exc=False, connect_retries=0, log=False, **more)
        except exceptions.ConnectFailure as error:
            if not repeat or isinstance(error, exceptions.ConnectTimeout):
                raise
            return self._send(service, method, path, more, repeat=False)

    def root(self, service: str) -> str:
        """Return the URL of a service without the version at its end.

        Raises:
            CloudError: Keystone does not answer, or refuses the application credential.
            ConfigurationError: the service has no endpoint.
        """
        wanted = f"find {service.capitalize()}"
        with _translated(wanted):
            found = self._adapter(service).get_endpoint()
        if not found:
            raise ConfigurationError(wanted, "the catalogue has no endpoint", "Check region and interface.")
        url = str(found).rstrip("/")
        last = url.rpartition("/")[2]
        return url[: -len(last) - 1] if last.startswith("v") and last[1:2].isdigit() else url

    def require_project(self) -> None:
        """Refuse an application credential that belongs to another project than the group.

        With such a credential, Nova would list other servers, and the servers of the group would leave the pool.

        Raises:
            ConfigurationError: it belongs to another project.
            CredentialRefused: Keystone does not accept it.
            CloudError: Keystone does not answer.
        """
        if self.settings.without_keystone:
            return
        wanted = "use the application credential"
        with _translated(wanted):
            found = self._adapter("octavia").get_project_id()
        if found != self.project_id:
            happened = f"it belongs to project {found}, and the group to project {self.project_id}"
            raise ConfigurationError(wanted, happened, "Create an application credential in the project of the group.")

    def _project(self) -> dict[str, str]:
        return {_PROJECT_HEADER: self.project_id} if self.settings.without_keystone else {}

    def _adapter(self, service: str) -> Any:
        with self._lock:
            if service not in self._adapters:
                self._adapters[service] = self._connect(service)
            return self._adapters[service]

    def _connect(self, service: str) -> Any:
        # The webhook API imports this package too, but never connects to the cloud. So these imports, which take a
        # second, happen at the first connection only.
        from keystoneauth1 import adapter, session  # noqa: PLC0415

        settings = self.settings
        if self._session is None:
            http = _http(settings.request_timeout)
            self._session = session.Session(auth=self._auth(), session=http, verify=settings.cafile or True)
        return adapter.Adapter(
            session=self._session,
            service_type=_KINDS[service],
            interface=settings.interface,
            region_name=settings.region_name,
            endpoint_override=settings.endpoints.get(service),
        )

    def _auth(self) -> Any:
        from keystoneauth1 import noauth  # noqa: PLC0415
        from keystoneauth1.identity import v3  # noqa: PLC0415

        if self.settings.without_keystone:
            return noauth.NoAuth()
        if self._credential is None:
            raise ConfigurationError(
                "connect to the cloud", "the group has no application credential", "Give the group one."
            )
        return v3.ApplicationCredential(
            auth_url=self.settings.auth_url or "",
            application_credential_id=self._credential.id,
            application_credential_secret=self._credential.secret.reveal().decode(),
        )


@contextmanager
def _translated(wanted: str) -> Iterator[None]:
    """Translate the errors of keystoneauth and requests, which have no common base."""
    try:
        yield
    except AmphoraDriverError:
        raise
    except Exception as error:
        raise no_answer(error, wanted) from error


def _refusal(method: str, path: str, answer: Any) -> ApiError:
    """Return the refusal of a service. Octavia's errors have the keys `faultcode` and `faultstring`."""
    error = ApiError.of(method, path, answer.status_code, answer.text)
    try:
        found = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return error
    text = found.get("faultstring") if isinstance(found, dict) else None
    if not isinstance(text, str):
        return error
    return ApiError(error.request, error.status, str(found.get("faultcode") or ""), " ".join(text.split()).rstrip("."))


def close_http_sessions() -> None:
    """Close the open connections of this process; the next request opens new ones."""
    with _lock:
        for one in _http_sessions.values():
            one.close()


def _http(timeout: float) -> Any:
    """Return the HTTP session that all owners of this process share, so that they share open connections.

    The session stores no cookie: a cookie of one owner must not reach a request of another one.
    """
    from keystoneauth1.session import TCPKeepAliveAdapter  # noqa: PLC0415
    from requests import Session  # noqa: PLC0415

    class Limited(TCPKeepAliveAdapter):
        """Applies the time-out and the deadline of the operation to each request, also to those for tokens."""

        def send(self, *words: Any, **options: Any) -> Any:
            return super().send(*words, **{**options, "timeout": limit_wait(timeout)})

    with _lock:
        found = _http_sessions.get(timeout)
        if found is None:
            found = Session()
            found.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
            for scheme in ("http://", "https://"):
                found.mount(scheme, Limited(pool_connections=_POOL_SIZE, pool_maxsize=_POOL_SIZE))
            _http_sessions[timeout] = found
        return found
