# SPDX-License-Identifier: Apache-2.0
"""A sandbox with a continuous drift audit, and operator's commands on the controller's host."""

import configparser
import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver import config
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.database.vault import Vault
from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.network.local import LocalNetwork
from amphora_driver.plugins import Catalogue
from amphora_driver.store import amphorae
from sandbox import demo

PAUSE = 2.0
AUDIT = {
    "amp_drift": {"interval": "1", "agent_interval": "0.5", "renderer_pause": f"{PAUSE}"},
    # A test that powers off an amphora needs the same amphora afterwards.
    "amp_failover": {"silent_after": "600"},
}


class DriftLab(Cloud):
    """A user, an operator, and manual changes."""

    def __init__(self, stack, settings, connection, database):
        super().__init__(settings, connection, database)
        self.stack = stack
        conf = config.load([str(settings.driver_configuration)])
        self.compute = NetnsCompute(conf, LocalNetwork(conf, database))

    # --- records ------------------------------------------------------------------------------------------------------

    def of(self, balancer):
        """Return the load balancer's amphorae that are not being replaced, oldest first."""
        found = self.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
        return [one for one in found if one.state is not AmphoraState.RETIRING]

    def row(self, amphora_id):
        return self.database.read(lambda c: c.execute(amphora.select().where(amphora.c.id == amphora_id)).one())

    def work(self, balancer):
        return self.database.read(lambda c: c.execute(job.select().where(job.c.load_balancer_id == balancer.id)).one())

    def settled(self, balancer):
        """Wait until no job is left and every amphora has confirmed the newest generation."""

        def ask():
            row = self.work(balancer)
            served = all(one.confirmed == row.generation for one in self.of(balancer))
            return row.generation if served and not row.dirty and row.applied == row.generation else None

        return self.until(ask, "every amphora confirms the newest generation")

    def drifted(self, amphora_id, words, seconds=60.0):
        """Wait until this drift of an amphora is recorded."""
        return self.until(lambda: words in (self.row(amphora_id).drift or ""), f"{words} is recorded", seconds)

    # --- manual changes ----------------------------------------------------------------------------------------------

    def agents(self, ask):
        """Call an agent as a controller does."""

        def go():
            conf = config.load([str(self.settings.driver_configuration)])
            trust = TrustStore(conf, self.database, Vault.load(conf.amp_database.encryption_key_file))
            client = AgentClient(conf, trust)
            try:
                return ask(client)
            finally:
                client.close()

        return namespaces.run_inside(namespaces.path(self.settings.control), go)

    def configuration(self, one):
        return self.agents(lambda client: client.configuration(one.id, one.management_address))

    def init(self, one):
        """Return the PID of the amphora's supervisor on the host."""
        sought = str(Path(self.settings.amphorae, one.id))
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                inner = (folder / "root/run/amphora-agent/supervisor.sock").exists()
            except OSError:
                continue
            if "amphora_agent.services.supervisor" in words and any(sought in word for word in words) and inner:
                return int(folder.name)
        raise AssertionError(f"amphora {one.id} does not run")

    def inside(self, one, command):
        place = f"--net=/proc/{self.init(one)}/root/run/netns/amphora-haproxy"
        subprocess.run(["nsenter", place, "--", *command.split()], check=True, capture_output=True)

    def service(self, one, name):
        """Return the PID of an amphora's service on the host."""
        init = self.init(one)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/{init}/root/run/amphora-agent/supervisor.sock")
            connection.sendall(json.dumps({"op": "status", "name": name}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                inner = json.loads(lines.readline())["services"][name]["pid"]
        # `init` may be the outer process, which is in the machine's PID namespace. Its children are in the amphora's.
        wanted = Path(f"/proc/{init}/ns/pid_for_children").stat().st_ino
        assert wanted != Path("/proc/self/ns/pid").stat().st_ino, "the amphora has its own PID namespace"
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (folder / "ns/pid").stat().st_ino != wanted:
                    continue
                status = (folder / "status").read_text()
            except OSError:
                continue
            if any(line.startswith("NSpid:") and int(line.split()[-1]) == inner for line in status.splitlines()):
                return int(folder.name)
        raise AssertionError(f"{name} does not run")

    def compute_conf(self):
        return config.load([str(self.settings.driver_configuration)])

    def vault(self):
        return Vault.load(str(self.settings.etc / "encryption.keys"))

    def catalogue(self, conf):
        return Catalogue(conf, self.database)

    # --- an operator --------------------------------------------------------------------------------------------------

    def amphoractl(self, *words):
        """Return status, output and errors of a command on the controller's host."""
        command = ["ip", "netns", "exec", self.settings.control, Path(sys.executable).with_name("amphoractl"), *words]
        environment = {**os.environ, **self.settings.environment()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        return done.returncode, done.stdout, done.stderr

    def use_agent(self, python):
        """Run agents with another Python from now on."""
        self.configure("amp_compute_netns", "agent_python", str(python))

    def configure(self, group, name, value):
        """Restart the controller with another value of an option."""
        self.stack.supervision.stop("amphora-controller")
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        parser.read(self.settings.driver_configuration)
        parser.set(group, name, value)
        with self.settings.driver_configuration.open("w") as opened:
            parser.write(opened)
        self.restart()

    def restart(self, name="amphora-controller"):
        program = {one.name: one for one in self.stack.programs()}[name]
        self.stack.supervision.stop(name)
        self.stack.supervision.start(program)


@contextmanager
def drift_lab(**choices):
    """A separate sandbox."""
    options = {**AUDIT, **choices.pop("options", {})}
    with running(options=options, **choices) as (stack, settings):
        database, connection = Database(settings.database_url), demo.connect(settings)
        lab = DriftLab(stack, settings, connection, database)
        try:
            yield lab
            lab.clean()
        finally:
            connection.close()
            database.dispose()
