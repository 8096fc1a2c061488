# SPDX-License-Identifier: Apache-2.0
"""State directories of amphorae: two deployments can share one parent directory."""

import uuid
from types import SimpleNamespace

import pytest

from amphora_driver import config
from amphora_driver.compute import state_dirs
from amphora_driver.compute.interface import BootRequest
from amphora_driver.compute.netns import NetnsCompute
from amphora_driver.errors import ComputeError

ONE, TWO, UNMARKED = (str(uuid.uuid4()) for _ in range(3))


def away(_network):
    raise ComputeError("list subnets", "no answer")


@pytest.fixture
def deployment(tmp_path):
    """A deployment by its prefix, in the shared directory. Its boots fail at the network."""

    def build(prefix):
        path = tmp_path / f"{prefix}.conf"
        path.write_text(f"[amp_compute_netns]\ndirectory = {tmp_path}/amphorae\nprefix = {prefix}\n")
        return NetnsCompute(config.load([str(path)]), SimpleNamespace(subnets=away))

    return build


def boot(compute, amphora_id):
    with pytest.raises(ComputeError, match="no answer"):
        compute.boot(BootRequest(amphora_id=amphora_id, load_balancer_id="lb", files={}))


def test_an_amphora_of_another_deployment_is_not_listed(tmp_path, deployment):
    one, two = deployment("one"), deployment("two")
    boot(one, ONE)
    boot(two, TWO)
    (tmp_path / "amphorae" / UNMARKED).mkdir()
    assert one.machines() == {ONE}, "also after an incomplete boot"
    assert two.machines() == {TWO}
    assert one.booted() == sorted([ONE, TWO, UNMARKED])


def test_the_owner_mark_is_removed_last(tmp_path, deployment, monkeypatch):
    compute = deployment("one")
    boot(compute, ONE)
    folder = tmp_path / "amphorae" / ONE
    (folder / "etc").mkdir()
    (folder / "console.log").write_text("words")

    def interrupted(_path):
        raise OSError("no more")

    with monkeypatch.context() as patched:
        patched.setattr(state_dirs.shutil, "rmtree", interrupted)
        with pytest.raises(OSError, match="no more"):
            state_dirs.remove_directory(folder)
    assert compute.machines() == {ONE}
    state_dirs.remove_directory(folder)
    assert compute.booted() == []
