# SPDX-License-Identifier: Apache-2.0
"""The qemu compute backend boots a machine once, finds it after a crash, and deletes it completely.

The tests do not need a guest system: the machines have empty disks, and their BIOS finds no boot sector.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import claimed
import pytest
from cloud import Cloud

from amphora_driver import config
from amphora_driver.compute.interface import BootRequest, MachineState
from amphora_driver.compute.qemu import QemuCompute
from amphora_driver.compute.qemu_command import DISK, PID, device_id
from amphora_driver.compute.qmp import open_monitor
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import find_by_last_argument
from amphora_driver.network import bridges
from amphora_driver.network.interface import management_port
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.secret import Secret

pytestmark = [
    pytest.mark.root,
    pytest.mark.quiet,
    pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="qemu-system-x86_64 is not installed"),
    pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="the kernel has no /dev/net/tun"),
]


class Lab:
    """A switch with a management network and one for load balancers, and an empty image."""

    def __init__(self, folder, number):
        self.folder = folder
        self.prefix = f"q{number}"
        self.images = folder / "images"
        self.images.mkdir()
        self.write_image("amphora")
        self.database = Database(f"sqlite:///{folder}/lab.sqlite")
        migrate.upgrade(self.database.url)
        file = folder / "lab.conf"
        file.write_text(
            f"[amp_compute_qemu]\ndirectory = {folder}/machines\nprefix = {self.prefix}\n"
            f"image_directory = {self.images}\n"
            f"memory = 128\naccelerator = tcg\n[amp_network_local]\nswitch = {self.prefix}-switch\n"
        )
        self.conf = config.load([str(file)])
        self.network = LocalNetwork(self.conf, self.database)
        self.compute = QemuCompute(self.conf, self.network)

    def write_image(self, tag, size="8M"):
        new = self.images / f".{tag}"
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", new, size], check=True)
        new.rename(self.images / f"{tag}.qcow2")

    def build(self):
        for name, beginning in (("management", "203.0.113"), ("net", "198.51.100")):
            self.network.define_network(name, name, f"br-{name[:4]}")
            self.network.define_subnet(
                AddressRange(
                    id=f"{name}4", network_id=name, name=name, cidr=f"{beginning}.0/24",
                    gateway=None, first=f"{beginning}.10", last=f"{beginning}.200",
                )
            )  # fmt: skip
        switch = bridges.Switch(f"{self.prefix}-switch", "management")
        switch.ensure(self.network.networks(), self.network.subnets())

    def tear_down(self):
        for amphora_id in self.compute.booted():
            self.compute.destroy(amphora_id)
        for name in namespaces.names(f"{self.prefix}-"):
            namespaces.remove(name)
        self.database.dispose()

    def order(self, amphora_id=None, **more):
        files = {"agent.conf": Secret(b"bind_address = {management_address}\n"), "heartbeat.key": Secret(b"ab" * 32)}
        amphora_id = amphora_id or str(uuid.uuid4())
        return BootRequest(amphora_id=amphora_id, load_balancer_id=str(uuid.uuid4()), files=files, **more)

    def place(self, amphora_id):
        return self.folder / "machines" / amphora_id

    def left(self, amphora_id):
        """Return the remains of an amphora."""
        found = [process.pid for process in find_by_last_argument(str(self.place(amphora_id) / PID))]
        found += [one.id for one in self.network.ports(amphora_id) if one.network_id == "management"]
        found += [path for path in [self.place(amphora_id)] if path.exists()]
        return found + self.taps(amphora_id)

    def taps(self, owner):
        def ask(kernel):
            links = [link for link in kernel.get_links() if link.get_attr("IFLA_IFALIAS") == owner]
            return [link.get_attr("IFLA_IFNAME") for link in links]

        return namespaces.run_with_netlink(namespaces.path(f"{self.prefix}-switch"), ask)

    def devices(self, amphora_id):
        with open_monitor(self.place(amphora_id), "look") as monitor:
            return monitor.device_ids()


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with claimed.number(lambda number: not namespaces.names(f"q{number}-")) as number:
        made = Lab(tmp_path_factory.mktemp("qemu"), number)
        try:
            made.build()
            yield made
        finally:
            made.tear_down()


@pytest.fixture
def booted(lab):
    order = lab.order()
    lab.compute.boot(order)
    yield order
    lab.compute.destroy(order.amphora_id)


def test_a_repeated_boot_starts_one_machine(lab):
    order = lab.order()
    with ThreadPoolExecutor(3) as threads:
        machines = list(threads.map(lambda _: lab.compute.boot(order), range(3)))
    assert len(set(machines)) == 1
    (machine,) = set(machines)
    assert machine.state is MachineState.RUNNING
    assert machine.management_address.startswith("203.0.113.")
    assert machine.image == lab.compute.image(None)
    assert lab.compute.get(order.amphora_id) == machine
    assert len(find_by_last_argument(str(lab.place(order.amphora_id) / PID))) == 1
    assert order.amphora_id in lab.compute.machines()
    assert len(lab.taps(order.amphora_id)) == 1
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []
    assert lab.compute.get(order.amphora_id) is None
    lab.compute.destroy(order.amphora_id)


def test_machine_survives_the_process_that_booted_it(lab):
    order = lab.order()
    script = (
        "import sys\nfrom amphora_driver import config\nfrom amphora_driver.compute.interface import BootRequest\n"
        "from amphora_driver.compute.qemu import QemuCompute\nfrom amphora_driver.network.local import LocalNetwork\n"
        "from amphora_driver.database.engine import Database\nimport os, signal\n"
        "conf = config.load([sys.argv[1]])\nnetwork = LocalNetwork(conf, Database(sys.argv[2]))\n"
        "QemuCompute(conf, network).boot(BootRequest(amphora_id=sys.argv[3], load_balancer_id='lb', files={}))\n"
        "os.killpg(0, signal.SIGKILL)\n"
    )
    argv = [sys.executable, "-c", script, str(lab.folder / "lab.conf"), lab.database.url, order.amphora_id]
    ended = subprocess.run(argv, start_new_session=True, check=False, env={**os.environ})
    assert ended.returncode == -signal.SIGKILL
    assert lab.compute.get(order.amphora_id).state is MachineState.RUNNING
    assert lab.compute.boot(order).state is MachineState.RUNNING
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []


def test_a_machine_without_a_record_is_found(lab, booted):
    assert lab.compute.get(booted.amphora_id).state is MachineState.RUNNING, "the machine runs"
    record = lab.place(booted.amphora_id) / "process.json"
    kept = record.read_bytes()
    record.unlink()
    assert lab.compute.get(booted.amphora_id).state is MachineState.RUNNING
    assert lab.compute.boot(booted).state is MachineState.RUNNING
    assert len(find_by_last_argument(str(lab.place(booted.amphora_id) / PID))) == 1
    record.write_bytes(kept)


def test_an_interrupted_boot_is_completed_by_the_next_one(lab, monkeypatch):
    order = lab.order()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(QemuCompute, "_start", die)
        with pytest.raises(KeyboardInterrupt):
            lab.compute.boot(order)
    assert lab.compute.get(order.amphora_id).state is MachineState.BUILDING
    assert order.amphora_id in lab.compute.machines()
    assert lab.compute.boot(order).state is MachineState.RUNNING
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []


def test_an_incomplete_machine_is_removed_completely(lab, monkeypatch):
    order = lab.order()

    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(QemuCompute, "_start", die)
        with pytest.raises(KeyboardInterrupt):
            lab.compute.boot(order)
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []


def test_an_ended_machine_is_failed_and_boots_with_a_new_disk(lab, booted):
    disk = lab.place(booted.amphora_id) / DISK
    before = disk.stat().st_ino
    # A process has no arguments during an exec.
    (qemu,) = Cloud.until(lambda: find_by_last_argument(str(lab.place(booted.amphora_id) / PID)), "qemu runs")
    os.kill(qemu.pid, signal.SIGKILL)
    machine = lab.compute.get(booted.amphora_id)
    while machine.state is MachineState.RUNNING:
        machine = lab.compute.get(booted.amphora_id)
    assert machine.state is MachineState.FAILED
    with pytest.raises(ComputeError, match="does not run"):
        lab.compute.attach(
            booted.amphora_id, lab.network.ensure_port(management_port(booted.amphora_id, "net", ["net4"]))
        )
    assert lab.compute.boot(booted).state is MachineState.RUNNING
    assert disk.stat().st_ino != before


def test_attach_and_detach_are_idempotent(lab, booted, monkeypatch):
    # The guest has no operating system that releases an interface.
    monkeypatch.setattr("amphora_driver.compute.qemu._RELEASE_SECONDS", 0.2)
    port = lab.network.ensure_port(management_port(booted.amphora_id, "net", ["net4"]))
    lab.compute.detach(booted.amphora_id, port)
    for _ in range(2):
        lab.compute.attach(booted.amphora_id, port)
        assert device_id(port) in lab.devices(booted.amphora_id)
        assert bridges.switch_interface_name(port.id) in lab.taps(booted.amphora_id)
    for _ in range(2):
        lab.compute.detach(booted.amphora_id, port)
        assert bridges.switch_interface_name(port.id) not in lab.taps(booted.amphora_id)


def test_an_incomplete_interface_is_completed(lab, booted):
    """The controller crashed between the tap's creation in qemu and the machine's new interface."""
    port = lab.network.ensure_port(management_port(booted.amphora_id, "net", ["net4"]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("amphora_driver.compute.qemu.interface_options", lambda _: {"driver": "nothing-like-it"})
        with pytest.raises(ComputeError, match="nothing-like-it"):
            lab.compute.attach(booted.amphora_id, port)
    lab.compute.attach(booted.amphora_id, port)
    assert device_id(port) in lab.devices(booted.amphora_id)


def test_a_machine_keeps_its_disk_and_ports_over_a_power_cycle(lab, booted):
    port = lab.network.ensure_port(management_port(booted.amphora_id, "net", ["net4"]))
    lab.compute.attach(booted.amphora_id, port)
    disk = (lab.place(booted.amphora_id) / DISK).stat().st_ino
    devices = lab.devices(booted.amphora_id)
    lab.compute.power_off(booted.amphora_id)
    assert lab.taps(booted.amphora_id) == []
    assert lab.compute.power_on(booted.amphora_id)
    assert not lab.compute.power_on(booted.amphora_id)
    assert lab.devices(booted.amphora_id) == devices
    assert (lab.place(booted.amphora_id) / DISK).stat().st_ino == disk


def test_an_image_by_its_tag(lab):
    lab.write_image("other", "9M")
    order = lab.order(image_tag="other")
    machine = lab.compute.boot(order)
    assert machine.image == lab.compute.image("other") != lab.compute.image(None)
    lab.compute.destroy(order.amphora_id)
    with pytest.raises(ComputeError, match=r"missing\.qcow2") as raised:
        lab.compute.boot(missing := lab.order(image_tag="missing"))
    assert raised.value.final
    assert lab.compute.image("missing") is None
    lab.compute.destroy(missing.amphora_id)
    assert lab.left(missing.amphora_id) == []


def test_secrets_are_for_root_only(lab, booted):
    readable = [path.name for path in lab.place(booted.amphora_id).iterdir() if path.stat().st_mode & 0o077]
    # The image is not secret, and its mode does not matter.
    assert set(readable) <= {"base.qcow2", PID}
    arguments = [
        Path(f"/proc/{one.pid}/cmdline").read_bytes()
        for one in find_by_last_argument(str(lab.place(booted.amphora_id) / PID))
    ]
    assert b"abab" not in b"".join(arguments)
