# SPDX-License-Identifier: Apache-2.0
"""One deployment in a folder: database, fake cloud, Octavia, and the processes of the control plane.

Invariant: no connection to the database is open during a fork, and no state except files, Octavia and the clock
outlives `begin`. So each run begins with the same rows, and a successor knows recorded state only.
"""

import os
import shutil
import time
from types import SimpleNamespace

import sqlalchemy as sa
from cryptography.fernet import Fernet
from fake_cloud import FakeCloud, FakeNetwork
from killed_forks import Clock, Points, run_in_fork
from octavia_lib.api.drivers import driver_lib
from octavia_model import Octavia
from processes import ControlPlane
from unit.driver.octavia_objects import NETWORK, SUBNET

from amphora_driver import config, driver
from amphora_driver.certificates.ca import create_authority
from amphora_driver.database import migrate, tables, tables_fleet
from amphora_driver.database.engine import Database
from amphora_driver.database.vault import Vault
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.plugins import Catalogue

SECOND_NETWORK, SECOND_SUBNET = (f"00000000-0000-4000-8000-0000000000a{number}" for number in (1, 2))
LEASE = 1.0
# Seconds of the clock within which a run has to settle after the last kill.
TIME_LIMIT = 60.0
_OPTIONS = f"""
[amp_controller]
lease = {LEASE}
retry_first = 0.1
retry_most = 2
drain_timeout = 10
forget_vip_after = 3
[amp_octavia]
status_socket = {{folder}}/status.sock
stats_socket = {{folder}}/stats.sock
get_socket = {{folder}}/get.sock
commit_timeout = 10
audit_after = 1
audit_interval = 0.5
[amp_health]
bind_address = 127.0.0.1
bind_port = 0
[amp_failover]
backoff_first = 0
[amp_rotation]
settle = 1
[amp_certificates]
settle = 2
client_ca = {{folder}}/controller.pem
ca_certificate = {{folder}}/amphora.pem
ca_private_key = {{folder}}/amphora.key
[amp_queue]
socket_dir = {{folder}}/bells
[amp_database]
encryption_key_file = {{folder}}/keys
connection = {{url}}
"""


class Catalog(Catalogue):
    """The real topologies, the fake cloud as the compute backend, and `FakeNetwork` as the network backend."""

    def __init__(self, conf, database, cloud):
        super().__init__(conf, database)
        self._world, self._network = cloud, FakeNetwork(conf, database, cloud)

    def network(self, name):
        return self._network

    def compute(self, name, network):
        return self._world

    def networks(self):
        return {"local": self._network}

    def computes(self):
        return {"netns": self._world}


class Deployment:
    """The folder, and everything that outlives a process."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.clock = Clock(monkeypatch)
        self.points = Points(folder, monkeypatch)
        self.cloud = FakeCloud(folder / "cloud")
        self.octavia = Octavia(folder, self.cloud.generation_served)
        # octavia_lib sleeps for 10 ms after each character. Its time-outs need the machine's own clock.
        monkeypatch.setattr(driver_lib, "time", SimpleNamespace(time=time.perf_counter, sleep=lambda _seconds: None))
        url = f"sqlite:///{folder}/driver.sqlite"
        _write_files(folder, url)
        monkeypatch.setenv(config.FILE_VARIABLE, str(folder / "driver.conf"))
        for cached in (config.shared, driver._shared):
            cached.cache_clear()
        self.conf = config.shared()
        self.vault = Vault.load(self.conf.amp_database.encryption_key_file)
        migrate.upgrade(url)
        self.database = Database(url, durable=False)
        self.catalogue = Catalog(self.conf, self.database, self.cloud)
        # The commits must survive the end of a process, but no power cut.
        driver._shared().database._durable = False
        driver._shared().catalogue = self.catalogue
        self.cloud.begin()
        self._define_networks()
        self._kept = {}
        self._generation = 0
        self.octavia.start()
        self.keep("nothing")

    def end(self):
        self.octavia.stop()
        for database in self._databases():
            database.dispose()
        for cached in (config.shared, driver._shared):
            cached.cache_clear()

    def _databases(self):
        return self.database, driver._shared().database

    def _close(self):
        """Close all connections and keep the engines, with their compiled statements."""
        for database in self._databases():
            for engine in database.engines:
                engine.dispose()

    def _take_over(self):
        """A fork uses the engines of its parent, which have no open connection."""
        for database in self._databases():
            database._pid = os.getpid()

    def _define_networks(self):
        network = self.catalogue.network(None)
        for network_id, subnet_id, name, prefix in (
            (NETWORK, SUBNET, "vip", "198.51.100"),
            (SECOND_NETWORK, SECOND_SUBNET, "members", "192.0.2"),
        ):
            network.define_network(network_id, name, name)
            ends = {"first": f"{prefix}.10", "last": f"{prefix}.250"}
            network.define_subnet(
                AddressRange(
                    id=subnet_id, network_id=network_id, name=name, cidr=f"{prefix}.0/24", gateway=f"{prefix}.1", **ends
                )
            )

    # -- initial states ------------------------------------------------------------------------------------------------

    def keep(self, name):
        """Save the present state under a name for `begin`."""
        self._close()
        folder = self.folder / f"kept {name}"
        folder.mkdir()
        for one in ("driver.sqlite", "cloud"):
            shutil.copy(self.folder / one, folder / one)
        self._kept[name] = self.octavia.rows()

    def knows(self, name):
        return name in self._kept

    def begin(self, name):
        self._close()
        self.points.disarm()
        for one in ("driver.sqlite-wal", "driver.sqlite-shm"):
            # A killed process leaves its write-ahead log, and SQLite would apply that to the copy.
            (self.folder / one).unlink(missing_ok=True)
        for one in ("driver.sqlite", "cloud"):
            shutil.copy(self.folder / f"kept {name}" / one, self.folder / one)
        self.octavia.begin(*self._kept[name])

    # --- processes ----------------------------------------------------------------------------------------------------

    def run_in_fork(self, part):
        """Run a part in a fork; returns the armed point that killed the fork, or None."""
        self._close()

        def child():
            self._take_over()
            part()

        return run_in_fork(child, self.points)

    def plane(self, *duties):
        """New processes of the control plane, with nothing in memory."""
        self._generation += 1
        return ControlPlane(self, f"process-{self._generation}", duties)

    def octavia_trees(self):
        """The load balancers in Octavia; in a fork, those at the time of the fork."""
        return list(self.octavia.seen_by_heartbeats().values())

    def amphorae(self):
        """The ids of all amphorae, also of spares."""
        return set(self.scalars(tables.amphora.c.id))

    def replacements(self):
        """All fail-overs, also those that have ended."""
        return self.read(sa.select(tables_fleet.failover).order_by(tables_fleet.failover.c.id))

    def read(self, query):
        return self.database.read(lambda connection: connection.execute(query).all())

    def scalars(self, column, *conditions):
        query = sa.select(column).where(*conditions)
        return self.database.read(lambda connection: connection.execute(query).scalars().all())


def _write_files(folder, url):
    for name in ("amphora", "controller"):
        certificate, key = create_authority(name)
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(key.reveal())
    (folder / "keys").write_bytes(Fernet.generate_key())
    (folder / "keys").chmod(0o600)
    (folder / "driver.conf").write_text(_OPTIONS.format(folder=folder, url=url))
