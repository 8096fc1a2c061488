# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova` with recorded requests."""

import uuid

import pytest
from nova_answers import Glance, Network, Script

from amphora_driver import config
from amphora_driver.compute.nova import NovaCompute

OPTIONS = {
    "amp_openstack": {"deployment_id": "one"},
    "amp_compute_nova": {
        "image_owner": "owner",
        "management_networks": "management",
        "flavor": "amphora",
        "deletion_timeout": 0.4,
    },
}


@pytest.fixture
def make_nova(tmp_path):
    """Makes backends whose requests go to a script; the network is a record of ports."""

    def make(*answers, openstack=None, images=("image-1",), **options):
        groups = {name: {**values} for name, values in OPTIONS.items()}
        groups["amp_openstack"] |= openstack or {}
        groups["amp_compute_nova"] |= options
        lines = [
            f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items() if value is not None)
            for name, values in groups.items()
        ]
        file = tmp_path / f"{uuid.uuid4()}.conf"
        file.write_text("".join(lines))
        made = NovaCompute(config.load([str(file)]), Network())
        script, glance = Script(answers), Glance(images)
        made._nova._service = script
        made._profiles._images._service = glance
        made.script, made.glance, made.ports = script, glance, made._network
        return made

    return make
