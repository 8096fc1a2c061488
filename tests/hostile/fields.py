# SPDX-License-Identifier: Apache-2.0
"""Every string field of the model: how a test sets it, and the expected value in the configuration.

`test_hostile_corpus.py` fails for a field of the model that has no entry here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import trees
from trees import REF, balancer

from amphora_driver.model.enums import L7Action, L7Compare, L7RuleType, PersistenceType
from amphora_driver.model.loadbalancer import LoadBalancer, Profile
from amphora_driver.validation import options

Make = Callable[[int, str], LoadBalancer]


@dataclass(frozen=True)
class Field:
    """One string field.

    Attributes:
        name: the kind of object and the field.
        make: returns the load balancer with this number and this value in the field.
        owner: the first letter of the faulty object's id; empty if the value is that id.
        good: a harmless value; a hostile value may be in its places of the configuration. `#` is the load
            balancer's number.
        option: its name in a refusal; None if the driver's check ignores the field, because a user cannot set it
            (ids), or because the API checks it (references).
        file: the corpus, `<field>/<file>`; variants of one field may share it.
        written: returns the text of a value in the configuration, if that differs from the value; a tuple contains
            several words.
        alone: whether all other objects are served if a value is refused.
    """

    name: str
    make: Make
    owner: str
    good: str
    option: str | None = None
    file: str = ""
    variant: str = ""
    written: Callable[[str], str | tuple[str, ...]] = str
    alone: bool = True

    @property
    def corpus(self) -> str:
        return f"{self.name}/{self.file or 'cases'}"

    def harmless(self, n: int) -> str:
        return self.good.replace("#", str(n))

    def at_fault(self, n: int, value: str) -> str:
        return f"{self.owner}{n}" if self.owner else value

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.file, self.variant)))


# The driver's check for each letter of an id.
CHECKS = {
    "b": options.check_loadbalancer,
    "l": options.check_listener,
    "p": options.check_pool,
    "m": options.check_member,
    "h": options.check_healthmonitor,
    "y": options.check_l7policy,
    "r": options.check_l7rule,
}


def _on(part: str, field: str, many: bool, n: int, value: str | None) -> LoadBalancer:  # noqa: C901 - a table
    """Return a load balancer with this value in one field of one part; None means an unset value."""
    given = {field: (value,) if many and value is not None else value}
    match part:
        case "loadbalancer":
            return balancer(n, **given)
        case "vip":
            return balancer(n, additional_vips=(trees.vip(**given),))
        case "profile":
            profile = Profile(connection_logging=True, **given)
            return balancer(n, front=trees.secure_listener(n, **PLAIN_TLS), profile=profile)
        case "listener":
            return balancer(n, front=trees.listener(n, **given))
        case "secure listener":
            return balancer(n, front=trees.secure_listener(n, **given))
        case "pool":
            return balancer(n, back=trees.pool(n, **given))
        case "encrypted pool":
            return balancer(n, back=trees.encrypted_pool(n, **given))
        case "persistence":
            return balancer(n, back=trees.sticky_pool(n, **given))
        case "member":
            return balancer(n, back=trees.pool(n, members=(trees.member(n, **given),)))
        case "monitor":
            return balancer(n, back=trees.pool(n, healthmonitor=trees.monitor(n, **given)))
        case "policy":
            return trees.with_policy(n, **given)
        case "rule":
            return balancer(n, front=trees.listener(n, l7policies=(trees.policy(n, rules=(trees.rule(n, **given),)),)))
    raise AssertionError(part)


PLAIN_TLS = {"tls_versions": None, "tls_ciphers": None, "alpn_protocols": None}
_OWNERS = {"loadbalancer": "b", "vip": "b", "profile": "l", "listener": "l", "secure listener": "l", "pool": "p"}
_OWNERS |= {"encrypted pool": "p", "persistence": "p", "member": "m", "monitor": "h", "policy": "y", "rule": "r"}
_NAMES = {"secure listener": "listener", "encrypted pool": "pool", "persistence": "sessionpersistence"}
_NAMES |= {"monitor": "healthmonitor", "policy": "l7policy", "rule": "l7rule"}


def _field(part: str, name: str, good: str, option: str | None = None, *, many: bool = False, **more) -> Field:
    owner = more.pop("owner", _OWNERS[part])
    make = partial(_on, part, name, many)
    return Field(f"{_NAMES.get(part, part)}.{name}", make, owner, good, option, **more)


def _address(value: str) -> str:
    found = ipaddress.ip_address(value)
    return f"[{found}]" if found.version == 6 else str(found)


def _codes(value: str) -> str:
    return value.replace(" ", "")


def _percent(value: str) -> str:
    """Return the value with doubled percent signs, because HAProxy expands `%` there."""
    return value.replace("%", "%%")


def _listener_id(n: int, value: str) -> LoadBalancer:
    return balancer(n, front=trees.listener(n, id=value))


def _pool_id(n: int, value: str) -> LoadBalancer:
    return balancer(n, front=trees.listener(n, default_pool_id=value), back=trees.pool(n, id=value))


def _policy(action: L7Action, field: str, n: int, value: str) -> LoadBalancer:
    return trees.with_policy(n, action=action, **{field: value})


def _redirect_pool(n: int, value: str) -> LoadBalancer:
    policy = trees.policy(n, action=L7Action.REDIRECT_TO_POOL, redirect_pool_id=value)
    # The harmless value is the pool of the neighbour.
    return balancer(n, front=trees.listener(n, l7policies=(policy,)))


def _prefix(value: str) -> str:
    """Return the written prefix; the path of a request follows it with its own slash."""
    return _percent(value if set("?#") & set(value) else value.rstrip("/") or "/")


def _metadata(field: str, n: int, value: str) -> LoadBalancer:
    return balancer(n, **{field: {value: value}})


def _cookie(n: int, value: str) -> LoadBalancer:
    return balancer(n, back=trees.sticky_pool(n, type=PersistenceType.HTTP_COOKIE, cookie_name=value))


def _logged(n: int, value: str) -> LoadBalancer:
    """Return a load balancer with Octavia's default log-format, which contains the project."""
    return balancer(n, project_id=value, profile=Profile(connection_logging=True))


def _versions(kind: str, n: int, value: str) -> LoadBalancer:
    plain = {**PLAIN_TLS, "tls_versions": (value,)}
    if kind == "pool":
        return balancer(n, back=trees.encrypted_pool(n, **plain))
    return balancer(n, front=trees.secure_listener(n, **plain))


PLAIN: tuple[Field, ...] = (
    Field("loadbalancer.project_id", _logged, "l", "good", written=_percent, alone=False),
    _field("loadbalancer", "name", "good"),
    _field("loadbalancer", "description", "good"),
    _field("loadbalancer", "vip_qos_policy_id", "good"),
    _field("loadbalancer", "vip_sg_ids", "good", "vip_sg_ids", many=True),
    # test_hostile_metadata.py tests the fields that come from flavor and availability zone.
    Field("loadbalancer.flavor", partial(_metadata, "flavor"), "b", "good"),
    Field("loadbalancer.availability_zone", partial(_metadata, "availability_zone"), "b", "good"),
    _field("vip", "address", "203.0.113.9", written=_address),
    _field("vip", "subnet_id", "good"),
    _field("vip", "network_id", "good"),
    _field("vip", "port_id", "good"),
    Field("listener.id", _listener_id, "", "good"),
    _field("listener", "loadbalancer_id", "good"),
    _field("listener", "name", "good"),
    _field("listener", "default_pool_id", "q#"),
    _field("listener", "insert_headers", "X-Forwarded-For", "insert_headers", many=True),
    _field("listener", "allowed_cidrs", "203.0.113.0/24", "allowed_cidrs", many=True),
    _field("secure listener", "default_tls_container_ref", f"{REF}good"),
    _field("secure listener", "sni_container_refs", f"{REF}good", many=True),
    _field("secure listener", "client_ca_tls_container_ref", f"{REF}good", "client_authentication"),
    _field("secure listener", "client_crl_container_ref", f"{REF}good"),
    Field("listener.tls_versions", partial(_versions, "listener"), "l", "TLSv1.2", "tls_versions"),
    _field("secure listener", "tls_ciphers", "ECDHE-RSA-AES256-GCM-SHA384", "tls_ciphers"),
    _field("secure listener", "alpn_protocols", "http/1.1", "alpn_protocols", many=True),
    Field("pool.id", _pool_id, "", "good"),
    _field("pool", "loadbalancer_id", "good"),
    _field("pool", "name", "good"),
    _field("encrypted pool", "tls_container_ref", f"{REF}good"),
    _field("encrypted pool", "ca_tls_container_ref", f"{REF}good", "crl_container_ref"),
    _field("encrypted pool", "crl_container_ref", f"{REF}good"),
    Field("pool.tls_versions", partial(_versions, "pool"), "p", "TLSv1.2", "tls_versions"),
    _field("encrypted pool", "tls_ciphers", "ECDHE-RSA-AES256-GCM-SHA384", "tls_ciphers"),
    _field("encrypted pool", "alpn_protocols", "http/1.1", "alpn_protocols", many=True),
    _field("persistence", "cookie_name", "good", "cookie_name", file="APP_COOKIE"),
    Field("sessionpersistence.cookie_name", _cookie, "p", "good", "cookie_name", file="HTTP_COOKIE"),
    _field("persistence", "persistence_granularity", "", "persistence_granularity"),
    _field("member", "id", "good", owner=""),
    _field("member", "pool_id", "good"),
    _field("member", "name", "good"),
    _field("member", "subnet_id", "good"),
    _field("member", "address", "203.0.113.9", "address", written=_address),
    _field("member", "monitor_address", "203.0.113.9", "monitor_address", written=_address),
    _field("member", "vnic_type", "normal", "vnic_type"),
    _field("monitor", "id", "good", owner=""),
    _field("monitor", "pool_id", "good"),
    _field("monitor", "name", "good"),
    _field("monitor", "http_method", "OPTIONS", "http_method"),
    _field("monitor", "url_path", "/good", "url_path"),
    _field("monitor", "expected_codes", "299", "expected_codes", written=_codes),
    _field("monitor", "domain_name", "good.example.com", "domain_name"),
    _field("policy", "id", "good", owner=""),
    _field("policy", "listener_id", "good"),
    _field("policy", "name", "good"),
    Field("l7policy.redirect_pool_id", _redirect_pool, "y", "q#"),
    Field(
        "l7policy.redirect_url",
        partial(_policy, L7Action.REDIRECT_TO_URL, "redirect_url"),
        "y",
        "https://good.example.com/",
        "redirect_url",
        written=_percent,
    ),
    Field(
        "l7policy.redirect_prefix",
        partial(_policy, L7Action.REDIRECT_PREFIX, "redirect_prefix"),
        "y",
        "https://good.example.com",
        "redirect_prefix",
        written=_prefix,
    ),
    _field("rule", "id", "good", owner=""),
    _field("rule", "l7policy_id", "good"),
    _field("profile", "compute", "good"),
    _field("profile", "network", "good"),
    _field("profile", "compute_flavor", "good"),
    _field("profile", "client_address", "good"),
    _field("profile", "compute_zone", "good"),
    _field("profile", "compute_zones", "good", many=True),
    _field("profile", "image_tag", "good"),
    _field("profile", "volume_zone", "good"),
    _field("profile", "management_network", "good"),
    _field("profile", "tls_minimum_version", "TLSv1.2"),
    _field("profile", "tls_ciphers", "ECDHE-RSA-AES256-GCM-SHA384"),
    _field("profile", "log_format", "good", alone=False),
    _field("profile", "admin_log_targets", "good", many=True),
    _field("profile", "tenant_log_targets", "good", many=True),
)

KEYED = {L7RuleType.HEADER: "X-Good", L7RuleType.COOKIE: "biscuit", L7RuleType.SSL_DN_FIELD: "CN"}
ONE_WAY = {L7RuleType.SSL_CONN_HAS_CERT: "True", L7RuleType.SSL_VERIFY_RESULT: "23"}
"""Types with fixed values, whose only comparison is EQUAL_TO."""


def _spellings(value: str) -> tuple[str, ...]:
    """Return a path in plain form and in the percent-encoded forms that clients send."""
    encoded = (" #", ' #"<>\\^`{|}')
    return tuple(dict.fromkeys((value, *(_octets(value, some, form) for some in encoded for form in ("X", "x")))))


def _octets(value: str, encoded: str, form: str) -> str:
    return "".join(
        letter if letter.isascii() and letter not in encoded else "".join(f"%{octet:02{form}}" for octet in octets)
        for letter, octets in ((letter, letter.encode()) for letter in value)
    )


def _rules() -> list[Field]:
    found = []
    for kind, compare in product(L7RuleType, L7Compare):
        if kind in ONE_WAY:
            continue
        key = {"key": KEYED[kind]} if kind in KEYED else {}
        make = _with_value(kind, compare, key)
        regex = compare is L7Compare.REGEX
        good = "/good" if kind is L7RuleType.PATH and not regex else "good"
        written = _spellings if kind in (L7RuleType.PATH, L7RuleType.FILE_TYPE) and not regex else str
        file = "REGEX" if regex else str(kind)
        found.append(Field("l7rule.value", make, "r", good, "L7 rule", file, f"{kind} {compare}", written))
        if key and compare in (L7Compare.EQUAL_TO, L7Compare.REGEX):
            make = _with_key(kind, compare)
            found.append(Field("l7rule.key", make, "r", KEYED[kind], "key", str(kind), str(compare)))
    for kind, good in ONE_WAY.items():
        make = _with_value(kind, L7Compare.EQUAL_TO, {})
        found.append(Field("l7rule.value", make, "r", good, "value", str(kind)))
    suffix = _with_value(L7RuleType.FILE_TYPE, L7Compare.EQUAL_TO, {})
    found.append(Field("l7rule.value", suffix, "r", "tar.good", "value", "FILE_TYPE-suffix", "", _suffixes))
    reject = _with_value(L7RuleType.HEADER, L7Compare.REGEX, {"key": "X-Good", "action": L7Action.REJECT})
    found.append(Field("l7rule.value", reject, "r", "good", "L7 rule", "REGEX-REJECT", "", _argument))
    return found


def _suffixes(value: str) -> tuple[str, ...]:
    return tuple(f".{one}" for one in _spellings(value))


def _argument(value: str) -> str:
    """Return the value as it is inside double quotes of HAProxy's second parser."""
    return value.replace("\\", "\\\\").replace('"', '\\"')


def _with_value(kind: L7RuleType, compare: L7Compare, more: dict[str, str]) -> Make:
    return lambda n, value: trees.with_rule(n, kind, compare, value=value, **more)


def _with_key(kind: L7RuleType, compare: L7Compare) -> Make:
    return lambda n, key: trees.with_rule(n, kind, compare, value="good", key=key)


FIELDS: tuple[Field, ...] = (*PLAIN, *_rules())
