# SPDX-License-Identifier: Apache-2.0
"""An amphora that Nova's own libvirt driver boots from the finished image, in the complete cloud.

AMPHORA_LIBVIRT=1 runs this test. AMPHORA_IMAGE_FILE names the image; without it, diskimage/build makes one, which takes
minutes.
"""

import os
import subprocess
import time
from pathlib import Path

import libvirt_host
import pytest

pytestmark = [
    pytest.mark.extended,
    pytest.mark.lasts(3600),
    pytest.mark.skipif(os.environ.get("AMPHORA_LIBVIRT") != "1", reason="AMPHORA_LIBVIRT=1 runs this"),
]
ROOT = Path(__file__).parents[2]
# The time-outs of `sandbox/config_files.py` for emulated machines.
EMULATED = {
    "amp_agent": {"connect_timeout": 15, "request_timeout": 180},
    "amp_controller": {"boot_timeout": 900},
    "amp_failover": {"silent_after": 30, "probe_timeout": 15},
}
ACTIVE_SECONDS = 900.0


@pytest.fixture(scope="session")
def installed():
    """Skip the tests on a machine without libvirt."""
    why = libvirt_host.missing()
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def disk(installed, tmp_path_factory):
    """The finished image, as an operator uploads it."""
    given = os.environ.get("AMPHORA_IMAGE_FILE")
    if given:
        return Path(given)
    place = tmp_path_factory.mktemp("finished")
    subprocess.run([ROOT / "diskimage/build", "--name", "finished", "--directory", place], check=True, timeout=3000)
    return place / "finished.qcow2"


@pytest.fixture(scope="module")
def host(disk, provider_stack):
    """The compute host, and a controller for its amphorae, which are virtual machines."""
    with libvirt_host.LibvirtHost(provider_stack) as made:
        options = {"amp_agent": {"services": "systemd"}}
        if made.accelerator == "qemu":
            options = {**EMULATED, "amp_agent": {**EMULATED["amp_agent"], **options["amp_agent"]}}
        with provider_stack.controller_options(options):
            yield made


@pytest.mark.parametrize("machine", ["pc", "q35"])
def test_an_amphora_of_novas_libvirt_driver_serves_and_leaves_nothing(host, disk, cloud_user, machine, record_property):
    with host.placement(disk, hw_machine_type=machine) as wanted, cloud_user.unchanged(), host.explained():
        began = time.monotonic()
        balancer = cloud_user.settled(cloud_user.request("machine", **wanted).id, seconds=ACTIVE_SECONDS)
        record_property(f"{machine}, {host.accelerator}: seconds until ACTIVE", round(time.monotonic() - began, 1))
        [server] = cloud_user.servers().values()
        assert (server.compute_host, server.availability_zone) == (libvirt_host.HOST, libvirt_host.ZONE)
        objects = host.objects()
        assert objects.keys() == {"domain", "process", "tap", "disk"}
        assert len(objects["tap"]) == 3, "management, VIP and members have a port each"
        assert cloud_user.answers(balancer.vip_address) == {"member1": 4, "member2": 4}
        cloud_user.delete(balancer)
        cloud_user.until(lambda: host.objects() == {}, "the host has no object of the amphora")
