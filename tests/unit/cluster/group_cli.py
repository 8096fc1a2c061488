# SPDX-License-Identifier: Apache-2.0
"""The commands `amphoractl group …` in this process, and Octavia as they use it."""

import configparser
import importlib
import io
from pathlib import Path

import msgspec
from cliff.commandmanager import CommandManager

from amphora_cluster.cloud.octavia import LoadBalancerIds
from amphora_cluster.model import Pool
from amphora_driver.cli.main import COMMANDS, Amphoractl

SETUP = Path(__file__).parents[3] / "setup.cfg"


def run_amphoractl(path, *words):
    """Run one command line; return its status, standard output and standard error."""
    commands = CommandManager(COMMANDS)
    parser = configparser.ConfigParser()
    parser.read(SETUP)
    for line in parser["options.entry_points"][COMMANDS].strip().splitlines():
        name, target = (part.strip() for part in line.split("="))
        module, attribute = target.split(":")
        if module.startswith("amphora_cluster"):
            commands.add_command(name.replace("_", " "), getattr(importlib.import_module(module), attribute))
    out, err = io.StringIO(), io.StringIO()
    status = Amphoractl(commands, stdout=out, stderr=err).run(["--config-file", str(path), *words])
    return status, out.getvalue(), err.getvalue()


class Octavia:
    """Octavia as `group create` uses it."""

    def __init__(self):
        self.pool = Pool(id="pool", load_balancer_id="lb", has_monitor=True, changeable=True, members=())
        self.error, self.foreign, self.made, self.deleted = None, None, [], []
        self.policy_pool = msgspec.structs.replace(self.pool, id="pool9", load_balancer_id="lb9")

    def __call__(self, conf, credential, project_id):
        self.credential, self.project_id = credential, project_id
        return self

    def require_project(self):
        if self.foreign:
            raise self.foreign

    def read_pool(self, group):
        if self.error is not None:
            raise self.error
        return self.policy_pool if group.owns_load_balancer else self.pool

    def create_load_balancer(self, group_id, body):
        self.made.append((group_id, body))
        return LoadBalancerIds(load_balancer_id="lb9", pool_id="pool9", created=len(self.made) == 1)

    def delete_load_balancer(self, group_id, load_balancer_id):
        self.deleted.append((group_id, load_balancer_id))
        return False
