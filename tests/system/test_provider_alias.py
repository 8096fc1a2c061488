# SPDX-License-Identifier: Apache-2.0
"""The provider driver under the name `amphora`, with the entry points of a derived image of Octavia.

Invariant: the commands of docs/how-to/deployment-tools.md change copies of the entry points of both distributions. The
copies precede those of the environment in the path of octavia-api and octavia-driver-agent.
"""

import os
import re
import shutil
import subprocess
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from cloud import Cloud
from sandbox_of_a_test import running

from amphora_driver import config
from amphora_driver.cli import host_checks
from amphora_driver.cli.status_checks import Result
from amphora_driver.database.engine import Database
from amphora_driver.openstack import octavia
from sandbox import demo

pytestmark = [pytest.mark.root, pytest.mark.extended]

PAGE = Path(__file__).parents[2] / "docs/how-to/deployment-tools.md"
NAMES = "amphora: HAProxy and keepalived, haproxy: HAProxy and keepalived"
OCTAVIA = {"api_settings": {"enabled_provider_drivers": NAMES, "default_provider_driver": "amphora"}}


def commands():
    """Return the commands of the page that change the entry points."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## The name `amphora`")[2]
    found = re.search(r"^    cd \S+/site-packages\n((?:    .*\n)+)", section, re.MULTILINE)
    assert found is not None
    return textwrap.dedent(found[1])


def derived_entry_points(folder):
    """Put copies of the entry points into a folder, and run the commands of the page there."""
    for name in ("octavia", "octavia-amphora-driver"):
        files = metadata.distribution(name).files
        source = next(one for one in files if one.name == "METADATA").locate().parent
        shutil.copytree(source, folder / source.name)
    subprocess.run(["sh", "-euc", commands()], cwd=folder, check=True)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site-packages")
    derived_entry_points(folder)
    with pytest.MonkeyPatch.context() as patch:
        former = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", f"{folder}:{former}" if former else str(folder))
        # stevedore caches entry points below HOME.
        patch.setenv("HOME", str(folder))
        with running(octavia_options=OCTAVIA, options={"amp_octavia": {"provider": "amphora"}}) as (_, settings):
            database = Database(settings.database_url)
            connection = demo.connect(settings)
            cloud = Cloud(settings, connection, database)
            yield cloud
            cloud.clean()
            connection.close()
            database.dispose()


def test_octavia_lists_both_names(cloud, tmp_path):
    account = tmp_path / "account.conf"
    address = f"load_balancer_endpoint_override = {cloud.settings.endpoint}"
    account.write_text(f"[amp_openstack]\nauth_type = none\n{address}\n")
    conf = config.load([str(cloud.settings.driver_configuration), str(account)])
    assert set(octavia.list_providers(conf, 30.0)) == {"amphora", "haproxy"}
    assert host_checks.check_provider(conf).result is Result.SUCCESS
    assert "Unable to load provider driver" not in (cloud.settings.log / "octavia-api.log").read_text()


@pytest.mark.parametrize(("asked", "named"), [(None, "amphora"), ("amphora", "amphora"), ("haproxy", "haproxy")])
def test_each_name_is_served_by_this_provider(cloud, asked, named):
    balancer = cloud.served(f"asked-{asked}", ("member1",), **({"provider": asked} if asked else {}))
    assert balancer.provider == named
    assert len(cloud.amphorae(balancer)) == 1
    assert cloud.answers(balancer.vip_address, 2) == {"member1": 2}
    cloud.balancers.update_load_balancer(balancer.id, description="changed")
    cloud.active(balancer.id)
    cloud.online(balancer.id)
    cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    cloud.gone(balancer.id)
    assert not cloud.amphorae(balancer)
