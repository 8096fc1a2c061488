# SPDX-License-Identifier: Apache-2.0
"""The requests of the resources OS::Octavia::* of Heat: creation, update and deletion of a stack.

The bodies and waits follow Heat at 526defd06 (`heat/engine/resources/openstack/octavia/`). Heat asks in turn for each
resource whose dependencies are complete: it repeats a request that Octavia answers with 409, and waits for the
provisioning status of the object itself, not of the load balancer. The template is that of Magnum's former Heat driver
(`magnum/drivers/common/templates/lb_api.yaml`) with a policy, a rule and members. Heat itself
does not run.
"""

import pytest
from agreement import assert_agreed
from client_session import CONFLICT, ClientSession

from sandbox import topology

pytestmark = [pytest.mark.root, pytest.mark.extended]


class Resource:
    """One resource of a stack.

    Args:
        kind: path and word of its requests.
        body: a function of the other resources by name, because their ids are known late.
        parents: names of the resources on which it depends.
    """

    def __init__(self, kind, body, *parents):
        self.kind, self.body, self.parents = kind, body, parents
        self.id = None
        self._sent = False

    def path(self, stack):
        place = self.kind[0].format(**{name: one.id for name, one in stack.items()})
        return place if self.id is None else f"{place}/{self.id}"

    def create(self, session, stack):
        """`check_create_complete`: return whether the object is ACTIVE."""
        if self.id is None:
            answer = session.attempt("POST", self.path(stack), {self.kind[1]: self.body(stack)})
            if answer is None:
                return False
            self.id = answer["id"]
        return self._is_active(session, stack)

    def update(self, session, stack, changes):
        """`check_update_complete`: return whether the object is ACTIVE again."""
        if not self._sent and session.attempt("PUT", self.path(stack), {self.kind[1]: changes}) is None:
            return False
        self._sent = True
        done = self._is_active(session, stack)
        self._sent = not done
        return done

    def delete(self, session, stack):
        """`check_delete_complete`: return whether the object is gone."""
        if not self._sent and session.attempt("DELETE", self.path(stack)) is None:
            return False
        self._sent = True
        shown = session.shown(self.path(stack))
        assert shown is None or shown["provisioning_status"] != "ERROR", shown
        return shown is None or shown["provisioning_status"] == "DELETED"

    def _is_active(self, session, stack):
        status = session.shown(self.path(stack))["provisioning_status"]
        assert status != "ERROR", self.path(stack)
        return status == "ACTIVE"


class HeatSession(ClientSession):
    """One attempt at a time, because Heat polls its resources in turn."""

    def attempt(self, method, path, body=None):
        """Return the object in the answer, {} for an empty one; None if Octavia answers 409."""
        answer = self._ask(method, path, body)
        if answer.status_code == CONFLICT:
            self.conflicts += 1
            return None
        assert answer.status_code in (200, 201, 202, 204), (method, path, answer.text)
        return next(iter(answer.json().values())) if answer.content else {}


def converge(cloud, names, ready, step):
    """Ask for each resource in turn until all are complete, as the scheduler of Heat does."""
    left = list(names)

    def one_round():
        for name in [one for one in left if ready(one, left)]:
            if step(name):
                left.remove(name)
        return not left

    cloud.until(one_round, f"the stack is complete, {left} are missing", 120)


def template(description):
    """Return the resources of a stack by name, with the defaults of Heat's properties."""
    listener = {"protocol_port": 80, "protocol": "HTTP", "admin_state_up": True, "description": description}
    listener |= {"connection_limit": -1, "name": "stack-listener", "allowed_cidrs": ["198.51.100.0/24"]}
    pool = {"admin_state_up": True, "description": "", "lb_algorithm": "ROUND_ROBIN", "protocol": "HTTP"}
    pool |= {"tls_enabled": False}
    rule = {"type": "HEADER", "compare_type": "EQUAL_TO", "key": "X-Stack", "value": "other", "invert": False}
    monitor = {"type": "TCP", "delay": 5, "max_retries": 5, "timeout": 5, "admin_state_up": True}

    def head(_):
        names = {"name": "stack-lb", "description": description, "provider": "haproxy"}
        return {**names, "vip_subnet_id": topology.VIP_SUBNET, "admin_state_up": True}

    def member(name):
        found = {"address": f"192.0.2.{topology.MEMBERS[name]}", "protocol_port": 8080, "weight": 1}
        return {**found, "admin_state_up": True, "subnet_id": topology.MEMBER_SUBNET, "tags": ["stack"]}

    policies, policy = ("l7policies", "l7policy"), {"admin_state_up": True, "action": "REDIRECT_TO_POOL"}
    made = {
        "lb": Resource(("loadbalancers", "loadbalancer"), head),
        "listener": Resource(
            ("listeners", "listener"), lambda stack: {**listener, "loadbalancer_id": stack["lb"].id}, "lb"
        ),
        "pool": Resource(
            ("pools", "pool"),
            lambda stack: {
                **pool,
                "session_persistence": {"type": "HTTP_COOKIE"},
                "name": "stack-pool",
                "listener_id": stack["listener"].id,
            },
            "listener",
        ),
        "other": Resource(
            ("pools", "pool"), lambda stack: {**pool, "name": "stack-other", "loadbalancer_id": stack["lb"].id}, "lb"
        ),
        "monitor": Resource(
            ("healthmonitors", "healthmonitor"), lambda stack: {**monitor, "pool_id": stack["pool"].id}, "pool"
        ),
        "policy": Resource(
            policies,
            lambda stack: {
                **policy,
                "name": "stack-policy",
                "position": 1,
                "listener_id": stack["listener"].id,
                "redirect_pool_id": stack["other"].id,
            },
            "listener",
            "other",
        ),
        "rule": Resource(("l7policies/{policy}/rules", "rule"), lambda _: {**rule, "admin_state_up": True}, "policy"),
    }
    for name, place in (("member1", "pool"), ("member2", "pool"), ("member3", "other")):
        path = f"pools/{{{place}}}/members"
        made[name] = Resource((path, "member"), lambda _, one=name: member(one), place)
    return made


UPDATES = {
    "lb": {"description": "updated"},
    "listener": {"connection_limit": 200, "allowed_cidrs": ["198.51.100.0/24", "203.0.113.0/24"]},
    "pool": {"lb_algorithm": "LEAST_CONNECTIONS", "session_persistence": {"type": "SOURCE_IP"}},
    "monitor": {"delay": 10, "timeout": 4},
    "policy": {"position": 2, "name": "renamed"},
    "rule": {"value": "third"},
    "member1": {"weight": 0},
    "member2": {"tags": ["updated"]},
}


def test_a_stack_is_created_updated_and_deleted(cloud):
    session, stack = HeatSession(cloud), template("a stack")

    def has_parents(name, left):
        return not set(stack[name].parents) & set(left)

    converge(cloud, stack, has_parents, lambda name: stack[name].create(session, stack))
    assert session.conflicts > 0, "independent resources meet a load balancer that is PENDING"
    # Each object was ACTIVE on its own; the load balancer is so as well.
    balancer = cloud.active(stack["lb"].id)
    assert_agreed(cloud, balancer)
    assert set(cloud.answers(balancer.vip_address, 8)) == {"member1", "member2"}

    converge(cloud, UPDATES, has_parents, lambda name: stack[name].update(session, stack, UPDATES[name]))
    assert_agreed(cloud, cloud.active(stack["lb"].id))
    assert cloud.answers(balancer.vip_address, 4) == {"member2": 4}, "the weight of the other member is 0"
    assert session.shown(f"loadbalancers/{balancer.id}")["description"] == "updated"

    def has_no_children(name, left):
        return not any(name in stack[one].parents for one in left)

    # Heat deletes a resource after those that depend on it, and the load balancer without a cascade.
    converge(cloud, stack, has_no_children, lambda name: stack[name].delete(session, stack))
    assert cloud.amphorae(balancer) == set()


def test_a_stack_is_deleted_while_it_is_created(cloud):
    """A failed or cancelled stack is deleted at once: the requests meet objects that are PENDING."""
    session, stack = HeatSession(cloud), template("a cancelled stack")
    for name in ("lb", "listener"):
        cloud.until(lambda one=stack[name]: one.id or one.create(session, stack) or one.id, f"{name} is accepted")
    made = {name: stack[name] for name in ("lb", "listener")}

    def has_no_children(name, left):
        return not any(name in made[one].parents for one in left)

    converge(cloud, made, has_no_children, lambda name: made[name].delete(session, made))
    assert session.shown(f"loadbalancers/{made['lb'].id}") is None
