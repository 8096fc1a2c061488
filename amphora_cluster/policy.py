# SPDX-License-Identifier: Apache-2.0
"""The policy of a group that owns its load balancer, with the properties of Senlin 16's policy.

`from_mapping` accepts the properties alone, or Senlin's document with `type`, `version` and `properties`. As in Senlin,
a number or truth value can also be a text. Defaults are those of Senlin. Values that Octavia would refuse are refused
here, with the path of the property. `delay` and `timeout` are seconds: Senlin's documentation says milliseconds, but
Senlin passes both to Octavia, which expects seconds.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec

from amphora_driver.errors import RequestError

POLICY_TYPE = "senlin.policy.loadbalance"
VERSIONS = ("1.0", "1.1", "1.2", "1.3")

_PROTOCOLS = ("HTTP", "HTTPS", "TCP")
_METHODS = ("ROUND_ROBIN", "LEAST_CONNECTIONS", "SOURCE_IP")
_PERSISTENCE = ("SOURCE_IP", "HTTP_COOKIE", "APP_COOKIE", "NONE")
_MONITORS = ("PING", "TCP", "HTTP", "HTTPS")
_HTTP_METHODS = ("GET", "POST", "PUT", "DELETE")
_CODES = re.compile(r"\d{3}(\s*,\s*\d{3})*|\d{3}-\d{3}")
# Octavia stores seconds and limits as 32-bit integers, so larger values are not permitted.
_MOST = 2**31 - 1


class SessionPersistence(msgspec.Struct, frozen=True, kw_only=True):
    """`pool.session_persistence`. The type NONE, or no type, is no persistence."""

    type: str | None = None
    cookie_name: str | None = None


class PoolPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The map `pool`.

    Args:
        subnet: name or id of the members' subnet.
        id: an existing pool of the existing load balancer.
    """

    subnet: str
    protocol: str = "HTTP"
    protocol_port: int = 80
    lb_method: str = "ROUND_ROBIN"
    admin_state_up: bool = True
    session_persistence: SessionPersistence = SessionPersistence()
    id: str | None = None


class VipPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The map `vip`: the load balancer's address and its listener.

    Args:
        subnet, network: name or id; at least one is set, unless the load balancer exists.
        connection_limit: of the listener; -1 for no limit.
    """

    subnet: str | None = None
    network: str | None = None
    address: str | None = None
    connection_limit: int = -1
    protocol: str = "HTTP"
    protocol_port: int = 80
    admin_state_up: bool = True


class MonitorPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The map `health_monitor`. `delay` and `timeout` are seconds."""

    type: str = "PING"
    delay: int = 10
    timeout: int = 5
    max_retries: int = 3
    admin_state_up: bool = True
    http_method: str | None = None
    url_path: str | None = None
    expected_codes: str | None = None
    id: str | None = None


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A load-balancing policy.

    Args:
        health_monitor: None for a pool without monitor.
        lb_status_timeout: has no effect. Senlin waits for the load balancer; a group continues when it is ACTIVE.
        loadbalancer: name or id of an existing load balancer. Its pool is `pool.id`, and nothing is created.
    """

    pool: PoolPolicy
    vip: VipPolicy = VipPolicy()
    health_monitor: MonitorPolicy | None = None
    lb_status_timeout: int = 300
    loadbalancer: str | None = None
    availability_zone: str | None = None
    flavor_id: str | None = None

    @property
    def creates_load_balancer(self) -> bool:
        """The policy describes a new load balancer, which the group owns."""
        return self.loadbalancer is None


def from_mapping(document: Mapping[str, Any]) -> PolicySpec:
    """The policy of a parsed document.

    Raises:
        RequestError: naming the path of the property that is wrong.
    """
    path = ""
    if isinstance(document, Mapping) and ("properties" in document or "type" in document):
        _known(document, "", ("type", "version", "properties"))
        if document.get("type", POLICY_TYPE) != POLICY_TYPE:
            _refuse("type", f"{document['type']!r} is not {POLICY_TYPE}")
        if str(document.get("version", VERSIONS[-1])) not in VERSIONS:
            _refuse("version", f"{document['version']!r} is not one of {', '.join(VERSIONS)}")
        document, path = document.get("properties", {}), "properties"
    values = _read(document, path, _PROPERTIES)
    if "pool" not in values:
        _refuse(_join(path, "pool"), "the map is required, with the property subnet")
    spec = PolicySpec(**values)
    _check_together(spec, path)
    return spec


def names(spec: PolicySpec) -> tuple[tuple[str, str], ...]:
    """Kind (`subnet`, `network`, `loadbalancer`) and value of each property that may be a name or an id."""
    found = [("subnet", spec.pool.subnet), ("subnet", spec.vip.subnet), ("network", spec.vip.network)]
    found.append(("loadbalancer", spec.loadbalancer))
    return tuple(dict.fromkeys((kind, value) for kind, value in found if value))


def to_create_body(
    spec: PolicySpec,
    name: str,
    *,
    ids: Mapping[tuple[str, str], str] | None = None,
    provider: str | None = None,
    tags: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The body of one POST /v2/lbaas/loadbalancers that creates load balancer, listener, pool and monitor.

    Args:
        name: of the load balancer, and the prefix of the names of its objects.
        ids: the id for each result of `names` that is a name. Other values are used as ids.
        provider: None for the cloud's default, or the one of the flavor.
        tags: of each created object, so that a repeated creation finds the objects of an interrupted one.
    """

    def identified(kind: str, value: str | None) -> str | None:
        return value if value is None or not ids else ids.get((kind, value), value)

    tagged = {"tags": list(tags)} if tags else {}
    listener = {
        "name": f"{name}-listener",
        "protocol": spec.vip.protocol,
        "protocol_port": spec.vip.protocol_port,
        "connection_limit": spec.vip.connection_limit,
        "admin_state_up": spec.vip.admin_state_up,
        "default_pool": _pool_body(spec, name, tagged),
        **tagged,
    }
    optional = {
        "vip_subnet_id": identified("subnet", spec.vip.subnet),
        "vip_network_id": identified("network", spec.vip.network),
        "vip_address": spec.vip.address,
        "availability_zone": spec.availability_zone,
        "flavor_id": spec.flavor_id,
        "provider": provider,
    }
    return {
        "loadbalancer": {
            "name": name,
            "admin_state_up": spec.vip.admin_state_up,
            **_given(optional),
            **tagged,
            "listeners": [listener],
        }
    }


def _pool_body(spec: PolicySpec, name: str, tagged: Mapping[str, Any]) -> dict[str, Any]:
    pool: dict[str, Any] = {
        "name": f"{name}-pool",
        "protocol": spec.pool.protocol,
        "lb_algorithm": spec.pool.lb_method,
        "admin_state_up": spec.pool.admin_state_up,
        **tagged,
    }
    persistence = spec.pool.session_persistence
    if persistence.type not in {None, "NONE"}:
        pool["session_persistence"] = _given({"type": persistence.type, "cookie_name": persistence.cookie_name})
    monitor = spec.health_monitor
    if monitor is not None:
        pool["healthmonitor"] = {
            "name": f"{name}-monitor",
            "type": monitor.type,
            "delay": monitor.delay,
            "timeout": monitor.timeout,
            "max_retries": monitor.max_retries,
            "admin_state_up": monitor.admin_state_up,
            **_given(
                {
                    "http_method": monitor.http_method,
                    "url_path": monitor.url_path,
                    "expected_codes": monitor.expected_codes,
                }
            ),
            **tagged,
        }
    return pool


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


_Check = Callable[[Any, str], Any]


def _text(value: Any, path: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        _refuse(path, f"{value!r} is not a text")
    text = str(value)
    if not text or len(text) > 255:
        _refuse(path, "the text needs 1 to 255 characters")
    return text


def _needed_text(value: Any, path: str) -> str:
    return _text(value, path) or _refuse(path, "a value is required")


def _one_of(allowed: tuple[str, ...], *, optional: bool = False) -> _Check:
    def check(value: Any, path: str) -> str | None:
        if value is None and optional:
            return None
        if value not in allowed:
            _refuse(path, f"{value!r} is not one of {', '.join(allowed)}")
        return str(value)

    return check


def _number(least: int, most: int = _MOST) -> _Check:
    def check(value: Any, path: str) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", value):
            number = int(value)
        if isinstance(number, bool) or not isinstance(number, int):
            _refuse(path, f"{value!r} is not a whole number")
        if not least <= number <= most:
            _refuse(path, f"{number} is not between {least} and {most}")
        return int(number)

    return check


def _flag(value: Any, path: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in {"1", "t", "true", "on", "y", "yes"}:
        return True
    if text in {"0", "f", "false", "off", "n", "no"}:
        return False
    return _refuse(path, f"{value!r} is neither true nor false")


def _address(value: Any, path: str) -> str | None:
    text = _text(value, path)
    if text is not None:
        try:
            ipaddress.ip_address(text)
        except ValueError:
            _refuse(path, f"{text!r} is not an IP address")
    return text


def _url_path(value: Any, path: str) -> str | None:
    text = _text(value, path)
    if text is not None and (not text.startswith("/") or re.search(r"\s", text)):
        _refuse(path, f"{text!r} does not begin with / or contains white space")
    return text


def _codes(value: Any, path: str) -> str | None:
    text = _text(value, path)
    if text is not None and not _CODES.fullmatch(text):
        _refuse(path, f"{text!r} is not a code (200), a list (200,202) or a range (200-204)")
    return text


def _map(kind: type[msgspec.Struct], checks: Mapping[str, _Check]) -> _Check:
    def check(value: Any, path: str) -> Any:
        values = _read(value, path, checks)
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in values:
                _refuse(_join(path, field.name), "a value is required")
        return kind(**values)

    return check


def _optional(check: _Check) -> _Check:
    return lambda value, path: None if value is None else check(value, path)


_PORT = _number(1, 65535)
_PROPERTIES: dict[str, _Check] = {
    "pool": _map(
        PoolPolicy,
        {
            "protocol": _one_of(_PROTOCOLS),
            "protocol_port": _PORT,
            "subnet": _needed_text,
            "lb_method": _one_of(_METHODS),
            "admin_state_up": _flag,
            "session_persistence": _map(
                SessionPersistence, {"type": _one_of(_PERSISTENCE, optional=True), "cookie_name": _text}
            ),
            "id": _text,
        },
    ),
    "vip": _map(
        VipPolicy,
        {
            "subnet": _text,
            "network": _text,
            "address": _address,
            "connection_limit": _number(-1),
            "protocol": _one_of(_PROTOCOLS),
            "protocol_port": _PORT,
            "admin_state_up": _flag,
        },
    ),
    "health_monitor": _optional(
        _map(
            MonitorPolicy,
            {
                "type": _one_of(_MONITORS),
                "delay": _number(1),
                "timeout": _number(1),
                "max_retries": _number(1, 10),
                "admin_state_up": _flag,
                "http_method": _one_of(_HTTP_METHODS, optional=True),
                "url_path": _url_path,
                "expected_codes": _codes,
                "id": _text,
            },
        )
    ),
    "lb_status_timeout": _number(1),
    "loadbalancer": _text,
    "availability_zone": _text,
    "flavor_id": _text,
}


def _read(values: Any, path: str, checks: Mapping[str, _Check]) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        _refuse(path or "policy", f"{values!r} is not a map")
    _known(values, path, tuple(checks))
    return {key: checks[key](value, _join(path, key)) for key, value in values.items()}


def _known(values: Mapping[str, Any], path: str, allowed: tuple[str, ...]) -> None:
    for key in values:
        if key not in allowed:
            _refuse(_join(path, str(key)), f"the property is unknown; known are {', '.join(allowed)}")


def _check_together(spec: PolicySpec, path: str) -> None:
    """Refuse values that contradict each other."""
    if spec.loadbalancer is None:
        if not spec.vip.subnet and not spec.vip.network:
            _refuse(_join(path, "vip"), "one of subnet and network is required")
        if spec.pool.id:
            _refuse(_join(path, "pool.id"), "an existing pool needs the property loadbalancer")
    elif not spec.pool.id:
        _refuse(_join(path, "pool.id"), "the pool of an existing load balancer is required")
    persistence = spec.pool.session_persistence
    cookie = _join(path, "pool.session_persistence.cookie_name")
    if persistence.type == "APP_COOKIE" and not persistence.cookie_name:
        _refuse(cookie, "the type APP_COOKIE needs the name of the cookie")
    if persistence.cookie_name and persistence.type != "APP_COOKIE":
        _refuse(cookie, "only the type APP_COOKIE has a cookie name")
    monitor = spec.health_monitor
    if monitor and monitor.type in {"PING", "TCP"}:
        for key in ("http_method", "url_path", "expected_codes"):
            if getattr(monitor, key) is not None:
                _refuse(_join(path, f"health_monitor.{key}"), f"a monitor of type {monitor.type} has no HTTP request")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _refuse(path: str, happened: str) -> NoReturn:
    raise RequestError("use the policy", f"{path}: {happened}", "Correct this property.")
