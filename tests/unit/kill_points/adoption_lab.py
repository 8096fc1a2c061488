# SPDX-License-Identifier: Apache-2.0
"""Adoptions in a deployment: Octavia's real tables beside its sockets, and the former amphorae in a file.

Invariant: the former amphorae serve while one of their ports is enabled. The new ones serve while one of them has the
VIPs and an enabled port.
"""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from deployment import Deployment
from killed_forks import StoredValue
from octavia_lib.api.drivers import data_models
from unit.adoption import octavia_rows
from unit.adoption.octavia_rows import AMPHORAE, LB, PORTS, VIP_ADDRESS, VIP_PORT
from unit.driver.octavia_objects import LISTENER, POOL, listener, load_balancer, member, pool

from amphora_driver.adoption import planner, survey, way_back
from amphora_driver.adoption import records as adoptions
from amphora_driver.adoption.adopter import Adopter
from amphora_driver.adoption.octavia_tables import OctaviaDatabase
from amphora_driver.adoption.records import Step
from amphora_driver.adoption.step_results import AdoptionContext
from amphora_driver.database.tables import amphora, desired_object, job, object_status, secret
from amphora_driver.database.tables_fleet import adoption
from amphora_driver.errors import NetworkError

OURS = "haproxy"
MEMBERS = 1
# Rounds after which an adoption counts as endless.
_MOST_ROUNDS, _SETTLE_ROUNDS = 200, 6


class FormerCloud:
    """The ports and machines of the former amphorae, and the disabled ports of the new ones, in a file."""

    def __init__(self, path):
        self.kept = StoredValue(path, json.loads, lambda value: json.dumps(value).encode())

    def begin(self, pair):
        ids = AMPHORAE if pair else AMPHORAE[:1]
        self.kept.begin({"enabled": {PORTS[one]: True for one in ids}, "off": [], "servers": 2, "refuses": 0})

    def refuse(self, times):
        """Refuse the next requests to disable ports."""
        with self.kept.open() as state:
            state["refuses"] = times

    def enable_old_ports(self, state, *, enabled):
        for one in state.amphorae:
            with self.kept.open() as kept:
                if not enabled and kept["refuses"]:
                    kept["refuses"] -= 1
                    raise NetworkError("disable a port", "Neutron refuses it", final=True)
                kept["enabled"][one.port_id] = enabled

    def enable_new_ports(self, port_ids, *, enabled):
        with self.kept.open() as kept:
            kept["off"] = [] if enabled else list(port_ids)

    def announce(self, state):
        """Nothing: the fake amphorae have no VIPs."""

    def remove(self, _state):
        with self.kept.open() as kept:
            kept["servers"] -= 1 if kept["servers"] else 0
            if kept["servers"]:
                return False
            kept["enabled"] = {}
            return True


class AdoptionLab:
    """One deployment with a load balancer of Octavia's own provider."""

    def __init__(self, deployment, monkeypatch):
        self.deployment = deployment
        self.former = FormerCloud(deployment.folder / "former")
        self._file = deployment.folder / "octavia.sqlite"
        # The fake cloud has no Neutron, and `FormerCloud` disables the ports.
        monkeypatch.setattr(planner, "NEUTRON", "local")
        monkeypatch.setattr(way_back, "_UNLOCK_SECONDS", 5.0)
        monkeypatch.setattr(way_back, "_HEARTBEAT_SECONDS", 0.1)
        self._take = deployment.octavia._take
        monkeypatch.setattr(deployment.octavia, "_take", self._record_status)
        self._engine = None

    # --- initial states -----------------------------------------------------------------------------------------------

    def begin(self, *, pair=False):
        """One load balancer that the former amphorae serve."""
        self.close()
        self.deployment.begin("nothing")
        self._engine = octavia_rows.write_database(self._file, pair=pair)
        self.former.begin(pair)
        self.pair = pair
        names = (LB, LISTENER, POOL, member().member_id)
        self.deployment.octavia.begin({LB: _tree()}, dict.fromkeys(names, "ACTIVE"), {})
        self.original = octavia_rows.rows(self._engine)

    def close(self):
        if self._engine is not None:
            self._engine.dispose()

    def _record_status(self, object_id, said, operating):
        self._take(object_id, said, operating)
        if object_id == LB and said is not None:
            octavia_rows.set_status(self._engine, said)

    # --- requests of an operator --------------------------------------------------------------------------------------

    def ask(self, *names, remove_after=0.0):
        """Request adoptions of these load balancers; without names, of the one in Octavia."""
        self._write(
            lambda c: adoptions.request_adoptions(
                c, names or [LB], max_in_progress=1, remove_after=remove_after, asked_by="admin@host"
            )
        )

    def revert(self):
        self._write(lambda c: adoptions.request_revert(c, LB))

    def _write(self, work):
        self.deployment.database.write(work)

    # --- processes ----------------------------------------------------------------------------------------------------

    def plane(self):
        """New processes of the control plane, one of which performs adoptions."""
        deployment = self.deployment
        made = deployment.plane()
        context = AdoptionContext(
            conf=deployment.conf,
            database=deployment.database,
            catalogue=deployment.catalogue,
            agents=deployment.cloud,
            octavia=OctaviaDatabase(f"sqlite:///{self._file}"),
            cloud=self.former,
            library=lambda: survey.connect_library(deployment.conf),
            on_due=lambda: None,
        )
        self._adopter = Adopter(context, f"adopter-{deployment._generation}")
        made._rounds.append(self._adopter.advance)
        return made

    def rounds(self, until):
        """Work until the adoption has reached a step, or has ended; then stop the processes in order."""
        plane = self.plane()
        for _ in range(_MOST_ROUNDS):
            plane.round()
            if self.step() in (until, *adoptions.ENDS):
                self._adopter.release()
                return
            self.deployment.clock.advance(plane.pause())
        raise AssertionError(f"the adoption stays in the step {self.step()}: {self.found().reason}")

    def kept(self, seconds, *, pair=False):
        """One adopted load balancer, whose former amphorae stay for some seconds."""
        self.begin(pair=pair)
        self.ask(remove_after=seconds)
        self.rounds(adoptions.Step.KEEP)
        self.settle()

    def die_at(self, point, until):
        """Work in a process that is killed at the point before the adoption reaches a step."""
        self.deployment.points.arm([point])
        assert self.deployment.run_in_fork(lambda: self.rounds(until)) == point
        self.deployment.points.disarm()

    def settle(self):
        """Work until the control plane has nothing to do."""
        plane = self.plane()
        for _ in range(_SETTLE_ROUNDS):
            plane.round()
            self.deployment.clock.advance(plane.pause())
        self._adopter.release()

    # --- observations -------------------------------------------------------------------------------------------------

    def found(self):
        return self.deployment.database.read(lambda c: adoptions.get_adoption(c, LB))

    def step(self):
        (step,) = self.deployment.scalars(adoption.c.step, adoption.c.load_balancer_id == LB) or [None]
        return None if step is None else adoptions.Step(step)

    def octavia(self, columns="provider, provisioning_status"):
        (row,) = octavia_rows.read(self._engine, f"SELECT {columns} FROM load_balancer")
        return row

    def rows(self):
        return octavia_rows.rows(self._engine)

    def change_octavia(self, statement):
        octavia_rows.write(self._engine, statement)

    def old_serve(self):
        return any(self.former.kept.read()["enabled"].values())

    def new_serve(self):
        off = self.former.kept.read()["off"]
        for machine in self.deployment.cloud.kept.read()["machines"].values():
            if machine["bundle"] and _has_vip(machine["bundle"]) and not set(machine["ports"].values()) & set(off):
                return True
        return False

    def new_amphorae(self):
        return self.deployment.scalars(amphora.c.id)


def assert_adopted(lab):
    lab.settle()
    assert lab.step() is Step.DONE
    assert lab.octavia("provider, provisioning_status, server_group_id") == (OURS, "ACTIVE", None)
    rows = lab.rows()
    assert (rows["amphora"], rows["amphora_health"], rows["amphora_member_port"]) == ([], [], [])
    assert lab.new_serve()
    assert not lab.old_serve()
    assert len(lab.new_amphorae()) == (2 if lab.pair else 1)
    assert set(lab.deployment.octavia.provisioning.values()) == {"ACTIVE"}
    assert lab.deployment.octavia.early == []


def assert_reverted(lab):
    lab.settle()
    assert lab.step() is Step.REVERTED
    assert lab.rows() == lab.original
    assert lab.old_serve()
    assert not lab.new_serve()
    assert lab.deployment.cloud.kept.read()["machines"] == {}
    assert set(lab.deployment.octavia.provisioning.values()) == {"ACTIVE"}
    for table in (job, desired_object, object_status, secret):
        assert lab.deployment.scalars(table.c.load_balancer_id) == []


@contextmanager
def open_lab():
    """A deployment for adoptions, in the memory of the machine if possible."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, pytest.MonkeyPatch.context() as patch:
        made = Deployment(Path(folder), patch)
        adoption = AdoptionLab(made, patch)
        try:
            yield adoption
        finally:
            adoption.close()
            made.end()


def _has_vip(bundle):
    return any(vip == f"{VIP_ADDRESS}/32" for one in bundle["interfaces"] for vip in one["vips"])


def _tree():
    fields = {"listener_id": data_models.Unset, "members": [member(MEMBERS)]}
    below = {"listeners": [listener(default_pool_id=POOL)], "pools": [pool(**fields)]}
    vip = {"vip_address": VIP_ADDRESS, "vip_port_id": VIP_PORT}
    return load_balancer(**below, **vip, flavor=None, availability_zone=None).to_dict(recurse=True, render_unsets=False)
