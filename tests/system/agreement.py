# SPDX-License-Identifier: Apache-2.0
"""Compares each field of the provider's record of a load balancer with Octavia's record.

Invariant: this module does not use the code that turns calls into rows. It reads Octavia's API as a user does, and the
provider's rows, and compares every field of the model that the API shows. An absent field equals None, "", [] and {}.

Not compared, because Octavia does not show them: the contents of flavor and availability zone, ports of additional
VIPs, and the order of SNI certificates.
"""

import msgspec

from amphora_driver.model.enums import Kind
from amphora_driver.store import desired_objects

_CHILDREN = {"listeners", "pools", "members", "healthmonitor", "l7policies", "rules"}
_HIDDEN = {"profile", "flavor", "availability_zone", "unread"}
_WITHOUT_ORDER = {"sni_container_refs", "allowed_cidrs", "additional_vips"}


def assert_agreed(cloud, balancer):
    """Assert that Octavia and the provider have the same objects with the same fields."""
    ours, octavias = recorded(cloud, balancer), shown(cloud, balancer)
    assert differences(ours, octavias) == {}


def assert_object_agreed(cloud, balancer, source, parent_id):
    """Assert that the provider's row of an object equals Octavia's API view.

    Args:
        cloud, balancer: the owners of the object.
        source: the API's view of the object.
        parent_id: the pool of a member, or the policy of a rule.
    """
    ours = {key: fields for key, fields in recorded(cloud, balancer).items() if key[1] == source["id"]}
    ((name, _),) = ours
    kind = Kind(name)
    more = {}
    if kind in (Kind.LISTENER, Kind.POOL):
        more = {"loadbalancer_id": source["loadbalancers"][0]["id"]}
    elif kind is Kind.HEALTH_MONITOR:
        more = {"pool_id": source["pools"][0]["id"]}
    elif kind in (Kind.MEMBER, Kind.L7RULE):
        more = {"pool_id" if kind is Kind.MEMBER else "l7policy_id": parent_id}
    assert differences(ours, {(name, source["id"]): _octavias(kind, {**source, **more})}) == {}


def differences(ours, octavias):
    """Return fields that differ, with both values, and objects that exist on one side only."""
    found = {}
    for key in ours.keys() | octavias.keys():
        mine, theirs = ours.get(key), octavias.get(key)
        if mine is None or theirs is None:
            found[key] = ("only ours", mine) if theirs is None else ("only Octavia's", theirs)
            continue
        for field in mine.keys() | theirs.keys():
            if mine.get(field) != theirs.get(field):
                found[(*key, field)] = (mine.get(field), theirs.get(field))
    return found


# --- ours -------------------------------------------------------------------------------------------------------------


def recorded(cloud, balancer):
    """Return the provider's rows of a load balancer: (kind, id) to fields, without empty ones."""
    tree = cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id))
    return {(desired_objects.kind_of(node).value, node.id): _ours(node) for node in desired_objects.iter_subtree(tree)}


def _ours(node):
    fields = {name: msgspec.to_builtins(getattr(node, name)) for name in node.__struct_fields__}
    for name in _CHILDREN | _HIDDEN:
        fields.pop(name, None)
    if desired_objects.kind_of(node) is Kind.LOAD_BALANCER:
        fields |= {f"vip_{name}": value for name, value in fields.pop("vip").items()}
        fields["additional_vips"] = [f"{one['subnet_id']} {one['address']}" for one in fields["additional_vips"]]
    return _canonical(fields)


# --- Octavia's --------------------------------------------------------------------------------------------------------


def shown(cloud, balancer):
    """Return the same mapping from Octavia's API."""

    def fetch(path):
        answer = cloud.balancers.get(path if "://" in path else cloud.url(path))
        assert answer.status_code == 200, answer.text
        body = answer.json()
        (word,) = (name for name in body if not name.endswith("_links"))
        # The API returns long lists in pages.
        more = [link["href"] for link in body.get(f"{word}_links", ()) if link["rel"] == "next"]
        return body[word] + fetch(more[0]) if more else body[word]

    found = {}

    def note(kind, source, **more):
        found[kind.value, source["id"]] = _octavias(kind, {**source, **more})

    note(Kind.LOAD_BALANCER, fetch(f"loadbalancers/{balancer.id}"))
    for listener in fetch(f"listeners?load_balancer_id={balancer.id}"):
        note(Kind.LISTENER, listener, loadbalancer_id=listener["loadbalancers"][0]["id"])
        for policy in fetch(f"l7policies?listener_id={listener['id']}"):
            note(Kind.L7POLICY, policy)
            for rule in fetch(f"l7policies/{policy['id']}/rules"):
                note(Kind.L7RULE, rule, l7policy_id=policy["id"])
    for pool in fetch(f"pools?load_balancer_id={balancer.id}"):
        note(Kind.POOL, pool, loadbalancer_id=pool["loadbalancers"][0]["id"])
        for member in fetch(f"pools/{pool['id']}/members"):
            note(Kind.MEMBER, member, pool_id=pool["id"])
        if pool.get("healthmonitor_id"):
            note(Kind.HEALTH_MONITOR, fetch(f"healthmonitors/{pool['healthmonitor_id']}"), pool_id=pool["id"])
    return found


def _octavias(kind, source):
    shape = desired_objects.MODEL_CLASSES[kind]
    fields = {name: source[name] for name in shape.__struct_fields__ if name not in _CHILDREN | _HIDDEN | {"vip"}}
    if kind is Kind.LOAD_BALANCER:
        fields |= {name: source[name] for name in ("vip_address", "vip_subnet_id", "vip_network_id", "vip_port_id")}
        fields["additional_vips"] = [f"{one['subnet_id']} {one['ip_address']}" for one in source["additional_vips"]]
    if kind is Kind.LISTENER:
        # Octavia maps each header to "true" or "false"; the provider lists the enabled headers.
        fields["insert_headers"] = sorted(name for name, on in source["insert_headers"].items() if on == "true")
    return _canonical(fields)


# --- both -------------------------------------------------------------------------------------------------------------


def _canonical(fields):
    found = {}
    for name, value in fields.items():
        said = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value
        if isinstance(said, (list, tuple)):
            said = sorted(said) if name in _WITHOUT_ORDER else list(said)
        if said not in (None, "", [], {}):
            found[name] = said
    return found
