# SPDX-License-Identifier: Apache-2.0
"""A sandbox whose amphorae are virtual machines: its settings, and its fixed choice of backend."""

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
    """The paths of Unix sockets below it must be short."""
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


def test_virtual_machines_get_images_and_longer_timeouts_under_emulation(folder, emulated):
    settings, conf = options(folder, compute="qemu", images=str(folder / "images"))
    assert conf.amp_compute.driver == "qemu"
    assert conf.amp_compute_qemu.image_directory == str(folder / "images")
    assert conf.amp_compute_qemu.directory == str(settings.machines) != conf.amp_compute_netns.directory
    assert conf.amp_compute_qemu.management_network == conf.amp_compute_netns.management_network
    assert conf.amp_agent.services == "systemd"
    _, plain = options(folder / "plain")
    assert plain.amp_compute.driver == "netns"
    assert plain.amp_agent.services == "supervisor"
    assert (conf.amp_controller.boot_timeout > plain.amp_controller.boot_timeout) is emulated
    assert (conf.amp_failover.silent_after > plain.amp_failover.silent_after) is emulated
    assert (conf.amp_agent.connect_timeout > plain.amp_agent.connect_timeout) is emulated
    assert settings.wait_timeout > conf.amp_controller.boot_timeout
    assert conf.amp_controller.lease == plain.amp_controller.lease
    assert conf.amp_failover.witnesses == plain.amp_failover.witnesses


def test_an_explicit_choice_has_precedence(folder):
    _, conf = options(
        folder, compute="qemu", options={"amp_compute_qemu": {"memory": "640"}, "amp_agent": {"services": "supervisor"}}
    )
    assert conf.amp_compute_qemu.memory == 640
    assert conf.amp_agent.services == "supervisor"


def test_a_sandbox_keeps_its_backend(folder):
    settings, _ = options(folder, compute="qemu")
    assert sandbox_settings.load_or_create_settings(folder) == settings
    assert sandbox_settings.load_or_create_settings(folder, compute="qemu") == settings
    with pytest.raises(SandboxError, match="created with qemu"):
        sandbox_settings.load_or_create_settings(folder, compute="netns")


def test_a_state_without_a_backend_uses_namespaces(folder):
    settings, _ = options(folder)
    file = folder / "sandbox.json"
    written = msgspec.json.decode(file.read_bytes())
    del written["compute"], written["images"]
    file.write_bytes(msgspec.json.encode(written))
    assert sandbox_settings.load_settings(folder) == settings
