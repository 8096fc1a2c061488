# SPDX-License-Identifier: Apache-2.0
"""Requests of users: the call of the driver, and the changes of Octavia's own transaction."""

import copy

import msgspec
from octavia_lib.api.drivers import data_models
from octavia_model import Change
from unit.driver.octavia_objects import LB, LISTENER, NETWORK, POOL, SUBNET, listener, load_balancer, member, pool

from amphora_driver.network.local import vip_owner


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a user.

    Attributes:
        call: the action of the API process, with the driver as its argument.
        change: the commit of Octavia, with the deployment as its argument; called after `call` has returned.
    """

    call: object
    change: object


def _document(node):
    return node.to_dict(recurse=True, render_unsets=False)


def _vip(deployment):
    """The addresses that the driver has given to Octavia."""
    (port,) = deployment.catalogue.network(None).ports(vip_owner(LB)) or (None,)
    return {} if port is None else {"vip_address": port.addresses[0].address, "vip_port_id": port.id}


def _populated():
    """A listener, its pool and two members."""
    fields = {"listener_id": data_models.Unset, "members": [member(1), member(2)]}
    return {"listeners": [listener(default_pool_id=POOL)], "pools": [pool(**fields)]}


def create(flavor=None, *, populated=False, **more):
    """A load balancer, alone or with everything in it."""
    fields = {"flavor": flavor or {}, **more}

    def call(provider):
        asked = {"vip_subnet_id": SUBNET, "vip_network_id": NETWORK}
        answer, _ = provider.create_vip_port(LB, "demo", asked)
        vip = {f"vip_{name}": answer[f"vip_{name}"] for name in ("address", "port_id", "subnet_id", "network_id")}
        below = _populated() if populated else {}
        provider.loadbalancer_create(load_balancer(**{**fields, **vip, **below}))

    def change(deployment):
        below = _populated() if populated else {"listeners": [], "pools": []}
        tree = _document(load_balancer(**{**fields, **_vip(deployment), **below}))
        return Change(load_balancer_id=LB, tree=tree, pending=dict.fromkeys(_ids(tree), "PENDING_CREATE"))

    return Request(call=call, change=change)


def _ids(tree):
    yield tree["loadbalancer_id"]
    yield from (one["listener_id"] for one in tree["listeners"])
    for one in tree["pools"]:
        yield one["pool_id"]
        yield from (each["member_id"] for each in one["members"])


def _changed(edit, *touched, **pending):
    """The change that an edit of the tree makes; the touched objects become PENDING_UPDATE."""

    def change(deployment):
        tree = copy.deepcopy(deployment.octavia.trees[LB])
        edit(tree)
        said = dict.fromkeys((LB, *touched), "PENDING_UPDATE")
        return Change(load_balancer_id=LB, tree=tree, pending={**said, **pending})

    return change


def add_listener(*, terminated=None):
    """A new listener; `terminated` has the fields of a listener that ends TLS."""
    made = listener(**(terminated or {}))

    def edit(tree):
        document = _document(made)
        tree["listeners"].append(document)

    return Request(
        call=lambda provider: provider.listener_create(made), change=_changed(edit, **{LISTENER: "PENDING_CREATE"})
    )


def add_member(number, **more):
    made = member(number, **more)

    def edit(tree):
        tree["pools"][0]["members"].append(_document(made))

    return Request(
        call=lambda provider: provider.member_create(made),
        change=_changed(edit, POOL, LISTENER, **{made.member_id: "PENDING_CREATE"}),
    )


def change_member(number, **fields):
    """Fields of a member change."""
    name = member(number).member_id

    def edit(tree):
        next(one for one in tree["pools"][0]["members"] if one["member_id"] == name).update(fields)

    return Request(
        call=lambda provider: provider.member_update(member(number), data_models.Member(member_id=name, **fields)),
        change=_changed(edit, POOL, LISTENER, name),
    )


def remove_member(number):
    name = member(number).member_id
    return Request(
        call=lambda provider: provider.member_delete(member(number)),
        change=_changed(lambda tree: None, POOL, LISTENER, **{name: "PENDING_DELETE"}),
    )


def set_members(before, after):
    """The members of the pool are replaced by these."""
    known, wanted = ({member(one).member_id: one for one in numbers} for numbers in (before, after))

    def edit(tree):
        tree["pools"][0]["members"] += [_document(member(one)) for name, one in wanted.items() if name not in known]

    pending = {name: "PENDING_UPDATE" if name in known else "PENDING_CREATE" for name in wanted}
    pending |= dict.fromkeys(known.keys() - wanted.keys(), "PENDING_DELETE")
    return Request(
        call=lambda provider: provider.member_batch_update(POOL, [member(one) for one in after]),
        change=_changed(edit, POOL, LISTENER, **pending),
    )


def change_load_balancer(**fields):
    """Attributes of the load balancer itself change."""
    new = data_models.LoadBalancer(loadbalancer_id=LB, **fields)
    return Request(
        call=lambda provider: provider.loadbalancer_update(load_balancer(), new),
        change=_changed(lambda tree: tree.update(fields)),
    )


def delete(*, cascade=False):
    """A deletion; Octavia shows the load balancer until the driver reports DELETED."""

    def change(deployment):
        pending = dict.fromkeys(_ids(deployment.octavia.trees[LB]), "PENDING_DELETE")
        return Change(load_balancer_id=LB, tree=None, pending=pending)

    return Request(call=lambda provider: provider.loadbalancer_delete(load_balancer(), cascade=cascade), change=change)


def resize(flavor):
    """A fail-over with another flavor; Octavia continues to show the original one."""
    return Request(
        call=lambda provider: provider.loadbalancer_failover_with_flavor(LB, flavor),
        change=_changed(lambda tree: None),
    )


def fail_over():
    """A fail-over of every amphora of the load balancer."""
    return Request(call=lambda provider: provider.loadbalancer_failover(LB), change=_changed(lambda tree: None))
