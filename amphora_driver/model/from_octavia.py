# SPDX-License-Identifier: Apache-2.0
"""Conversion of Octavia's objects to the model.

Invariant: only ids and fields that Octavia has set are used. Octavia's data models have `Unset` for missing fields, and
their `to_dict` drops lists, so this module reads each attribute. Objects from `DriverLibrary.get_*` have None instead,
and nested plain dictionaries. Both forms result in the same model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from octavia_lib.api.drivers import data_models

from amphora_driver.errors import ModelError
from amphora_driver.model import l7policy_positions
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import (
    CHILDREN,
    MODEL_CLASSES,
    L7Policy,
    Listener,
    LoadBalancer,
    Member,
    Node,
    Pool,
)
from amphora_driver.model.secret_refs import SECRET_FIELDS, Purpose, SecretMaterial, SecretName
from amphora_driver.secret import Secret

S = TypeVar("S", bound=msgspec.Struct)
F = TypeVar("F", bound=Callable[..., Any])

# Each Octavia object contains its own id under a name that depends on the kind of the object.
ID_NAMES: dict[Kind, str] = {
    Kind.LOAD_BALANCER: "loadbalancer_id",
    Kind.LISTENER: "listener_id",
    Kind.POOL: "pool_id",
    Kind.MEMBER: "member_id",
    Kind.HEALTH_MONITOR: "healthmonitor_id",
    Kind.L7POLICY: "l7policy_id",
    Kind.L7RULE: "l7rule_id",
}
_CHILDREN = {name for children in CHILDREN.values() for name in children}
_CONVERTED_SEPARATELY = {*_CHILDREN, "id", "vip", "additional_vips", "profile"}
_VIP_FIELDS = ("address", "network_id", "port_id", "subnet_id")


def _type_errors_as_model_errors(read: F) -> F:
    """Decorate a function to raise ModelError for values of a type that Octavia does not document."""

    @functools.wraps(read)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return read(*args, **kwargs)
        except (TypeError, AttributeError, ValueError, KeyError) as error:
            raise ModelError("read an object from Octavia", f"{type(error).__name__}: {error}") from error

    return cast("F", call)


def get_id(kind: Kind, source: Any) -> str:
    """Return the id of an object from Octavia."""
    return str(_get(source, ID_NAMES[kind]))


def get_value(source: Any, name: str) -> Any:
    """Return one attribute of an object from Octavia; None if it is not set."""
    value = _get(source, name)
    return None if value is data_models.Unset else value


@_type_errors_as_model_errors
def changed_fields(kind: Kind, new: Any) -> dict[str, Any]:
    """Return the fields that an update sets, by the model's names.

    None means the default value. A field without a default is not changed then.
    """
    named: dict[str, Any] = {}
    for field in msgspec.structs.fields(MODEL_CLASSES[kind]):
        if field.name in _CONVERTED_SEPARATELY:
            continue
        value = _get(new, field.name)
        if value is data_models.Unset:
            continue
        if value is None or (field.name == "session_persistence" and not value):
            if field.default is not msgspec.NODEFAULT:
                named[field.name] = field.default
            continue
        named[field.name] = _value(field.name, value)
    return named


def apply_changes(node: S, named: Mapping[str, Any]) -> S:
    """Return the object with changed fields, validated against its model class."""
    known = {field: getattr(node, field) for field in node.__struct_fields__}
    children = {name: known.pop(name) for name in list(known) if name in _CHILDREN}
    built = _convert(type(node), {**cast("dict[str, Any]", msgspec.to_builtins(known)), **named})
    whole: S = msgspec.structs.replace(built, **children)
    return cast("S", l7policy_positions.clear_unused_redirects(whole)) if isinstance(whole, L7Policy) else whole


@_type_errors_as_model_errors
def read_secrets(kind: Kind, source: Any, *, paired: bool = True) -> dict[SecretName, SecretMaterial]:
    """Return the delivered secrets of an object; of a load balancer, those of its listeners and pools.

    Octavia does not deliver the content of every reference. Of a new listener, the contents of SNI certificates are not
    `paired` with the references: octavia-lib returns contents in database order, references in the user's order.
    """
    if kind is Kind.LOAD_BALANCER:
        found: dict[SecretName, SecretMaterial] = {}
        for name, child_kind in (("listeners", Kind.LISTENER), ("pools", Kind.POOL)):
            for child in get_value(source, name) or ():
                found |= read_secrets(child_kind, child, paired=paired)
        return found
    return _read_own_secrets(kind, source, paired=paired)


def _read_own_secrets(kind: Kind, source: Any, *, paired: bool) -> dict[SecretName, SecretMaterial]:
    found: dict[SecretName, SecretMaterial] = {}
    for field, purpose in SECRET_FIELDS.get(MODEL_CLASSES[kind], ()):
        refs, contents = get_value(source, field), get_value(source, f"{field.rpartition('_')[0]}_data")
        if field.endswith("_ref"):
            refs, contents = [refs], [contents]
        if not refs or not contents or len(refs) != len(contents) or (len(refs) > 1 and not paired):
            continue
        for ref, content in zip(refs, contents, strict=True):
            if ref and content:
                name = SecretName(get_id(kind, source), purpose, str(ref))
                found.setdefault(name, _read_material(f"{kind.value[:-1]} option {field}", purpose, content))
    return found


def _read_material(option: str, purpose: Purpose, content: Any) -> SecretMaterial:
    if purpose is not Purpose.CERTIFICATE:
        return SecretMaterial(option=option, text=_to_secret(option, content))
    if not isinstance(content, Mapping):
        raise ModelError(f"read the secret of {option}", f"expected a dictionary, not {type(content).__name__}")
    key, passphrase = content.get("private_key"), content.get("passphrase")
    return SecretMaterial(
        option=option,
        text=_to_secret(option, content.get("certificate")),
        private_key=_to_secret(option, key) if key else None,
        passphrase=_to_secret(option, passphrase) if passphrase else None,
        intermediates=tuple(_to_secret(option, one) for one in content.get("intermediates") or ()),
    )


def _to_secret(option: str, value: Any) -> Secret:
    if isinstance(value, str):
        return Secret(value.encode("utf-8", "replace"))
    if not isinstance(value, bytes):
        raise ModelError(f"read the secret of {option}", f"expected text, not {type(value).__name__}")
    return Secret(value)


def load_balancer(source: Any) -> LoadBalancer:
    """Convert a load balancer with all delivered children."""
    return cast("LoadBalancer", node(Kind.LOAD_BALANCER, source))


def listener(source: Any) -> Listener:
    """Convert a listener with its delivered L7 policies."""
    return cast("Listener", node(Kind.LISTENER, source))


def pool(source: Any) -> Pool:
    """Convert a pool with its delivered members and health monitor."""
    return cast("Pool", node(Kind.POOL, source))


def member(source: Any) -> Member:
    """Convert a member."""
    return cast("Member", node(Kind.MEMBER, source))


@_type_errors_as_model_errors
def node(kind: Kind, source: Any) -> Node:
    """Convert an object of any kind with its delivered children."""
    fields = _given_fields(kind, source)
    if kind is Kind.LOAD_BALANCER:
        _add_load_balancer_fields(fields, source)
    built: Any = _convert(MODEL_CLASSES[kind], fields)
    if isinstance(built, L7Policy):
        built = l7policy_positions.clear_unused_redirects(built)
    children: dict[str, Any] = {}
    for name, child_kind in CHILDREN.get(kind, {}).items():
        given = get_value(source, name)
        if child_kind is Kind.HEALTH_MONITOR:
            children[name] = node(child_kind, given) if given else None
        else:
            children[name] = tuple(node(child_kind, child) for child in given or ())
    return cast("Node", msgspec.structs.replace(built, **children))


def _add_load_balancer_fields(fields: dict[str, Any], source: Any) -> None:
    fields["vip"] = {name: _text_or_empty(get_value(source, f"vip_{name}")) for name in _VIP_FIELDS}
    fields["additional_vips"] = [
        {name: _text_or_empty(vip.get("ip_address" if name == "address" else name)) for name in _VIP_FIELDS}
        for vip in get_value(source, "additional_vips") or ()
    ]
    # Octavia's calls to the driver contain the availability zone as a dictionary. `DriverLibrary.get_*` returns only
    # the zone's name, which the model does not need.
    if not isinstance(fields.get("availability_zone"), dict):
        fields.pop("availability_zone", None)


def _get(source: Any, name: str) -> Any:
    if isinstance(source, Mapping):
        return source.get(name, data_models.Unset)
    return getattr(source, name, data_models.Unset)


def _given_fields(kind: Kind, source: Any) -> dict[str, Any]:
    """Return the fields with a value; in a complete object, None and Unset both mean the default."""
    fields = {"id": get_id(kind, source)}
    for field in MODEL_CLASSES[kind].__struct_fields__:
        if field in _CONVERTED_SEPARATELY:
            continue
        value = get_value(source, field)
        if value is not None:
            fields[field] = _value(field, value)
    return fields


def _value(field: str, value: Any) -> Any:
    if field == "insert_headers":
        return sorted(str(name) for name, flag in value.items() if _parse_header_flag(name, flag))
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items() if item is not None}
    return value


def _parse_header_flag(header: str, value: Any) -> bool:
    """Parse Octavia's header flags, which are the texts "true" and "false"."""
    word = str(value).lower()
    if word not in ("true", "false"):
        raise ModelError(f"insert the header {header!r}", f"{value!r} is neither true nor false")
    return word == "true"


def _text_or_empty(value: Any) -> str:
    return "" if value is None else str(value)


def _convert(model_class: type[S], fields: Mapping[str, Any]) -> S:
    try:
        # `strict=False` accepts numbers as text, because Octavia sends some numbers as text, for example
        # `redirect_http_code`.
        return msgspec.convert(fields, model_class, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"read the {model_class.__name__.lower()} from Octavia", str(error), object_id=str(fields.get("id"))
        ) from error
