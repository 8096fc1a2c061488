# SPDX-License-Identifier: Apache-2.0
"""Two compute backends serve one deployment; each load balancer stays on its first backend."""

import json

import msgspec
import pytest
import sqlalchemy as sa
from cloud import Cloud
from installed import package
from sandbox_of_a_test import running

from amphora_driver.database import tables
from amphora_driver.database.engine import Database
from amphora_driver.plugins import COMPUTE
from sandbox import demo
from sandbox.stack import Stack

pytestmark = [pytest.mark.root, pytest.mark.extended]

# A complete second backend: it has its own images and its own directory of amphorae.
SOURCE = """
    from pathlib import Path

    from amphora_driver.compute.state_dirs import StateDirs
    from amphora_driver.compute.netns import NetnsCompute


    class Imaging(NetnsCompute):
        supports = NetnsCompute.supports | {"amp_image_tag"}

        def __init__(self, conf, network):
            super().__init__(conf, network)
            options = conf.amp_compute_netns
            self._state_dirs = StateDirs(Path(options.directory).with_name("imaged"), options.prefix)

        def boot(self, order):
            machine = super().boot(order)
            (self._state_dirs.path(order.amphora_id) / "image").write_text(order.image_tag or "")
            return machine
"""
BOTH = {"amp_compute": {"enabled_drivers": "imaging"}}
SWITCHED = {"amp_compute": {"driver": "imaging", "enabled_drivers": "netns"}}
LEFT = {"amp_compute": {"driver": "imaging"}}
_OURS = ("octavia-api", "octavia-driver-agent", "amphora-controller")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A sandbox with a second compute backend installed, and a way to restart it with other options."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # stevedore caches entry points below HOME; this path does not exist afterwards.
    monkeypatch.setenv("HOME", str(tmp_path))
    package(tmp_path, "imaging_compute", SOURCE, {COMPUTE: {"imaging": "Imaging"}})
    with running(options=BOTH) as (stack, settings):
        database = Database(settings.database_url)
        connection = demo.connect(settings)

        def reconfigure(options):
            for name in _OURS:
                stack.supervision.stop(name)
            Stack(msgspec.structs.replace(settings, options=options)).up()

        yield Cloud(settings, connection, database), reconfigure
        connection.close()
        database.dispose()


def amphorae(cloud, folder):
    root = cloud.settings.amphorae.with_name(folder)
    return {one.name for one in root.iterdir()} if root.exists() else set()


def backend(cloud, balancer):
    row = tables.job.c
    return cloud.database.read(
        lambda c: c.execute(sa.select(row.compute).where(row.load_balancer_id == balancer.id)).scalar()
    )


def fail_over(cloud, balancer):
    before = cloud.amphorae(balancer)
    cloud.balancers.failover_load_balancer(balancer.id)
    cloud.active(balancer.id)
    cloud.until(
        lambda: len(cloud.amphorae(balancer)) == 1 and not cloud.amphorae(balancer) & before, "the amphora is replaced"
    )


def test_two_compute_backends_side_by_side(place):
    cloud, reconfigure = place
    profile = cloud.balancers.create_flavor_profile(
        name="imaged",
        provider_name="haproxy",
        flavor_data=json.dumps({"compute_driver": "imaging", "amp_image_tag": "new"}),
    )
    flavor = cloud.balancers.create_flavor(name="imaged", flavor_profile_id=profile.id, is_enabled=True)
    plain = cloud.served("plain", ("member1",))
    imaged = cloud.served("imaged", ("member2",), flavor_id=flavor.id)

    def each_is_with_its_own(*others):
        assert (backend(cloud, plain), backend(cloud, imaged)) == ("netns", "imaging")
        assert amphorae(cloud, "amphorae") == cloud.amphorae(plain)
        assert amphorae(cloud, "imaged") == set().union(*map(cloud.amphorae, (imaged, *others)))
        assert cloud.answers(plain.vip_address, 2) == {"member1": 2}
        assert cloud.answers(imaged.vip_address, 2) == {"member2": 2}

    each_is_with_its_own()
    (image,) = cloud.settings.amphorae.with_name("imaged").glob("*/image")
    assert image.read_text() == "new"

    # After a change of the default, old load balancers stay, also at a fail-over; new ones use the new default.
    reconfigure(SWITCHED)
    fail_over(cloud, plain)
    fail_over(cloud, imaged)
    new = cloud.served("new", ("member3",))
    assert backend(cloud, new) == "imaging"
    each_is_with_its_own(new)

    # The old backend is disabled: only its load balancers are affected, and they keep serving.
    reconfigure(LEFT)
    cloud.balancers.create_member(cloud.pool_of(plain), **cloud.member("member3"))
    cloud.until(
        lambda: cloud.balancers.get_load_balancer(plain.id).provisioning_status == "ERROR",
        "the load balancer is in ERROR",
    )
    reason = cloud.database.read(
        lambda c: c.execute(sa.select(tables.job.c.error).where(tables.job.c.load_balancer_id == plain.id)).scalar()
    )
    assert "netns" in reason
    assert "enabled_drivers" in reason
    assert cloud.answers(plain.vip_address, 2) == {"member1": 2}
    cloud.balancers.create_member(cloud.pool_of(new), **cloud.member("member1"))
    cloud.active(new.id)
    cloud.balanced(new.vip_address, {"member1": 1, "member3": 1})

    # After the backend is enabled again, its load balancer continues.
    reconfigure(SWITCHED)
    cloud.balancers.failover_load_balancer(plain.id)
    cloud.until(
        lambda: cloud.balancers.get_load_balancer(plain.id).provisioning_status == "ACTIVE",
        "the load balancer is ACTIVE",
    )
    cloud.balanced(plain.vip_address, {"member1": 1, "member3": 1})
    cloud.until(lambda: amphorae(cloud, "amphorae") == cloud.amphorae(plain), "netns has its amphora")

    cloud.clean()
    cloud.until(lambda: not amphorae(cloud, "amphorae") | amphorae(cloud, "imaged"), "both backends are empty")
