# SPDX-License-Identifier: Apache-2.0
"""A sandbox whose amphorae are virtual machines: what is different, and that it stays what it was begun as."""

import tempfile
from pathlib import Path

import msgspec
import pytest

from amphora_driver import config
from amphora_driver.compute import kvm_probe
from sandbox import config_files
from sandbox import settings as sandbox_settings
from sandbox.settings import SandboxError


@pytest.fixture
def folder():
    """Unix sockets below it have to have short paths."""
    with tempfile.TemporaryDirectory(prefix="ads-") as made:
        yield Path(made)


def options(folder, **choices):
    settings = sandbox_settings.load_or_create_settings(folder, "x1", "/usr/bin/python3", **choices)
    config_files.write(settings)
    return settings, config.load([str(settings.driver_configuration)])


@pytest.fixture(autouse=True, params=["emulated", "accelerated"])
def emulated(request, monkeypatch):
    """Whether KVM works here."""
    monkeypatch.setattr(kvm_probe, "usable", lambda _: request.param == "accelerated")
    return request.param == "emulated"


def test_virtual_machines_get_their_images_and_more_time_where_they_are_emulated(folder, emulated):
    settings, conf = options(folder, compute="qemu", images=str(folder / "images"))
    assert conf.compute.driver == "qemu"
    assert conf.compute_qemu.image_directory == str(folder / "images")
    assert conf.compute_qemu.directory == str(settings.machines) != conf.compute_netns.directory
    assert conf.compute_qemu.management_network == conf.compute_netns.management_network
    assert conf.agent.services == "systemd"
    _, plain = options(folder / "plain")
    assert plain.compute.driver == "netns"
    assert plain.agent.services == "supervisor"
    assert (conf.controller.boot_timeout > plain.controller.boot_timeout) is emulated
    assert (conf.failover.silent_after > plain.failover.silent_after) is emulated
    assert (conf.agent.connect_timeout > plain.agent.connect_timeout) is emulated
    assert settings.wait_timeout > conf.controller.boot_timeout
    assert conf.controller.lease == plain.controller.lease
    assert conf.failover.witnesses == plain.failover.witnesses


def test_what_is_chosen_besides_counts_more(folder):
    _, conf = options(
        folder, compute="qemu", options={"compute_qemu": {"memory": "640"}, "agent": {"services": "supervisor"}}
    )
    assert conf.compute_qemu.memory == 640
    assert conf.agent.services == "supervisor"


def test_a_sandbox_stays_what_it_was_begun_as(folder):
    settings, _ = options(folder, compute="qemu")
    assert sandbox_settings.load_or_create_settings(folder) == settings
    assert sandbox_settings.load_or_create_settings(folder, compute="qemu") == settings
    with pytest.raises(SandboxError, match="created with qemu"):
        sandbox_settings.load_or_create_settings(folder, compute="netns")


def test_one_that_an_older_version_began_is_made_of_namespaces(folder):
    settings, _ = options(folder)
    file = folder / "sandbox.json"
    written = msgspec.json.decode(file.read_bytes())
    del written["compute"], written["images"]
    file.write_bytes(msgspec.json.encode(written))
    assert sandbox_settings.load_settings(folder) == settings
