# SPDX-License-Identifier: Apache-2.0
"""A program with the parts of a Senlin engine that decide about a load balancer: policy, actions, objects and drivers.

The code of Senlin is not changed. The program replaces two things of its environment: the source of random numbers, so
that a choice can be compared, and the length of its pauses, because Senlin waits ten seconds for each change. The
database is Senlin's own, in memory. Standard input has one request in each line, and standard output has one answer in
each line, both JSON. The answer to a failed call has the name of the exception.

    python senlin_program.py
"""

import json
import os
import sys
import time
import traceback
import warnings
from random import Random
from types import SimpleNamespace

# openstacksdk's log goes to the standard output of the process, as Senlin demands.
answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)
warnings.simplefilter("ignore")

import eventlet  # noqa: E402
from oslo_config import cfg  # noqa: E402
from oslo_utils import timeutils  # noqa: E402
from senlin import objects  # noqa: E402
from senlin.common import consts, scaleutils  # noqa: E402
from senlin.common.context import RequestContext  # noqa: E402
from senlin.db.sqlalchemy import api, models  # noqa: E402
from senlin.engine import environment  # noqa: E402
from senlin.engine.actions.base import Action  # noqa: E402
from senlin.engine.cluster import Cluster  # noqa: E402
from senlin.engine.cluster_policy import ClusterPolicy  # noqa: E402
from senlin.engine.node import Node  # noqa: E402
from senlin.objects.credential import Credential  # noqa: E402
from senlin.objects.node import Node as NodeRecord  # noqa: E402
from senlin.policies import base as policies  # noqa: E402
from senlin.policies import lb_policy  # noqa: E402
from senlin.profiles import base as profiles  # noqa: E402

USER, PROJECT, PAUSE = "user", "project", 0.2


class Choices:
    """The candidates that the policy chooses for an action. The objects of an action are stand-ins."""

    def delete(self, seed, action):
        scaleutils.random = SimpleNamespace(seed=lambda: None, randrange=Random(seed).randrange)
        made = self._action(action)
        return lb_policy.LoadBalancingPolicy._get_delete_candidates(None, "cluster", made)

    def post(self, action):
        return lb_policy.LoadBalancingPolicy._get_post_candidates(None, self._action(action))

    def properties(self, document):
        """All properties of a policy with Senlin's defaults; a failure for a document that Senlin refuses."""
        made = lb_policy.LoadBalancingPolicy("policy", document)
        made.validate(None)
        return dict(made.properties)

    @staticmethod
    def _action(described):
        nodes = [
            SimpleNamespace(
                id=node["id"],
                status=node["status"],
                tainted=node["tainted"],
                created_at="2026-01-01" if node["born"] else None,
            )
            for node in described["nodes"]
        ]
        entity = SimpleNamespace(**{**described["entity"], "nodes": nodes})
        return SimpleNamespace(
            action=described["action"],
            entity=entity,
            inputs=described["inputs"],
            data=described["data"],
            RES_OK="OK",
            RES_ERROR="ERROR",
        )


class Engine:
    """One cluster with one policy, in a database of Senlin."""

    def begin(self, auth_url):
        """Create the database and a cluster of servers without nodes."""
        cfg.CONF([], project="senlin", default_config_files=[])
        cfg.CONF.set_override("connection", "sqlite://", "database")
        cfg.CONF.set_override("auth_url", auth_url, "authentication")
        cfg.CONF.set_override("service_password", "password", "authentication")
        eventlet.sleep = lambda seconds=0: time.sleep(min(seconds, PAUSE))
        models.BASE.metadata.create_all(api.get_engine())
        objects.register_all()
        environment.initialize()
        self.context = RequestContext(user_id=USER, project_id=PROJECT, is_admin=True)
        trust = {"user": USER, "project": PROJECT, "cred": {"openstack": {"trust": "trust"}}, "data": {}}
        Credential.create(self.context, trust)
        spec = {
            "type": "os.nova.server",
            "version": "1.0",
            "properties": {
                "name": "server",
                "flavor": "flavor",
                "image": "image",
                "networks": [{"network": "members"}],
            },
        }
        self.profile = profiles.Profile("profile", spec, user=USER, project=PROJECT)
        self.profile.store(self.context)
        made = Cluster("cluster", 0, self.profile.id, user=USER, project=PROJECT, context=self.context)
        made.store(self.context)
        self.cluster_id = made.id

    def get_cluster_id(self):
        return self.cluster_id

    def cluster(self):
        return Cluster.load(self.context, cluster_id=self.cluster_id)

    def create_node(self, name, server):
        """A node whose server exists, as after Senlin's NODE_CREATE."""
        made = Node(name, self.profile.id, self.cluster_id, context=self.context, user=USER, project=PROJECT)
        made.physical_id, made.status, made.created_at = server, consts.NS_ACTIVE, timeutils.utcnow(True)
        return made.store(self.context)

    def delete_node(self, node):
        NodeRecord.delete(self.context, node)

    def node(self, node):
        found = NodeRecord.get(self.context, node)
        return {"data": found.data, "status": found.status, "reason": found.status_reason}

    def change_data(self, node, data):
        NodeRecord.update(self.context, node, {"data": data})

    def create_policy(self, properties):
        spec = {"type": "senlin.policy.loadbalance", "version": "1.3", "properties": properties}
        made = policies.Policy("policy", spec, user=USER, project=PROJECT)
        made.validate(self.context, validate_props=True)
        return made.store(self.context)

    def attach(self, policy):
        """`LoadBalancingPolicy.attach` by the engine, which records the binding."""
        return self.cluster().attach_policy(self.context, policy, {})

    def detach(self, policy):
        return self.cluster().detach_policy(self.context, policy)

    def binding(self, policy):
        return ClusterPolicy.load(self.context, self.cluster_id, policy).data["LoadBalancingPolicy"]["data"]

    def check(self, when, name, target, inputs, data):
        """`pre_op` or `post_op` of the attached policies, as the engine calls them for an action."""
        made = Action(target, name, self.context, inputs=inputs, data=data, cluster_id=self.cluster_id)
        made.store(self.context)
        made.policy_check(self.cluster_id, when)
        return made.data


def serve():
    parts = {"choices": Choices(), "engine": Engine()}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            part, _, name = request["do"].partition(".")
            answer = {"answer": getattr(parts[part], name)(*request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the test gets each failure
            traceback.print_exc()
            answer = {"error": type(error).__name__, "text": str(error)}
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()


serve()
