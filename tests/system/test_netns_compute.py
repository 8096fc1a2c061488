# SPDX-License-Identifier: Apache-2.0
"""The netns compute backend boots an amphora once, finds it after a crash, and deletes it completely."""

import os
import signal
import ssl
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import create_connection

import claimed
import pytest

from amphora_driver import config
from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.compute.interface import BootRequest, MachineState
from amphora_driver.compute.netns import INNER_NAMESPACE, NetnsCompute
from amphora_driver.database import migrate
from amphora_driver.database.engine import Database
from amphora_driver.errors import ComputeError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import find_by_last_argument
from amphora_driver.model.network import FixedAddress
from amphora_driver.network import bridges
from amphora_driver.network.interface import management_port
from amphora_driver.network.ip_allocation import AddressRange
from amphora_driver.network.local import LocalNetwork
from amphora_driver.secret import Secret

pytestmark = pytest.mark.root
AGENT_PYTHON = os.environ.get("AMPHORA_AGENT_PYTHON", sys.executable)
PORT = 9443


class Lab:
    """A switch, a management network with a controller on it, and one network for load balancers."""

    def __init__(self, folder, number):
        self.folder = folder
        self.prefix = f"n{number}"
        self.file = folder / "lab.conf"
        self.write_configuration(AGENT_PYTHON)
        self.database = Database(f"sqlite:///{folder}/lab.sqlite")
        migrate.upgrade(self.database.url)
        self.network = LocalNetwork(self.conf, self.database)
        self.compute = NetnsCompute(self.conf, self.network)
        self.certificate, key = create_authority("amphorae")
        self.authority = Authority(self.certificate, key)
        self.controllers = create_authority("controllers")

    def write_configuration(self, python):
        self.file.write_text(
            f"[amp_database]\nconnection = sqlite:///{self.folder}/lab.sqlite\n"
            f"[amp_compute_netns]\ndirectory = {self.folder}/amphorae\nprefix = {self.prefix}\n"
            f"agent_python = {python}\n"
            f"[amp_network_local]\nswitch = {self.prefix}-switch\n"
        )
        self.conf = config.load([str(self.file)])

    def build(self):
        self.network.define_network("management", "management", "br-mgmt")
        self.network.define_network("net", "net", "br-net")
        self.network.define_subnet(self._subnet("mgmt4", "management", "203.0.113", None))
        self.network.define_subnet(self._subnet("v4", "net", "198.51.100", "198.51.100.1"))
        switch = bridges.Switch(f"{self.prefix}-switch", "management")
        switch.ensure(self.network.networks(), self.network.subnets())
        wanted = [FixedAddress(subnet_id="mgmt4", address="203.0.113.2")]
        port = self.network.fixed_port("control", "management", wanted)
        namespaces.ensure(self.control)
        segment = next(one for one in self.network.networks() if one.id == "management")
        switch.connect(port, segment, "control", namespaces.path(self.control), "eth0")
        bridges.configure_interface(namespaces.path(self.control), "eth0", port, self.network.subnets("management"))

    @staticmethod
    def _subnet(name, network_id, prefix, gateway):
        return AddressRange(
            id=name, network_id=network_id, name=name, cidr=f"{prefix}.0/24", gateway=gateway,
            first=f"{prefix}.10", last=f"{prefix}.200",
        )  # fmt: skip

    @property
    def control(self):
        return f"{self.prefix}-control"

    def tear_down(self):
        for amphora_id in self.compute.booted():
            self.compute.destroy(amphora_id)
        for name in namespaces.names(f"{self.prefix}-"):
            namespaces.remove(name)
        self.database.dispose()

    def order(self, amphora_id=None):
        amphora_id = amphora_id or str(uuid.uuid4())
        conf = (
            f"[agent]\namphora_id = {amphora_id}\nbind_address = {{management_address}}\nbind_port = {PORT}\n"
            "services = supervisor\n[heartbeat]\ninterval = 1\ntargets = 203.0.113.2:9879\n"
        )
        files = {
            "agent.conf": Secret(conf.encode()),
            "server.pem": self.authority.issue_server(amphora_id, 1).bundle(),
            "client_ca.pem": Secret(self.controllers[0]),
            "heartbeat.key": Secret(b"ab" * 32),
        }
        return BootRequest(amphora_id=amphora_id, load_balancer_id=str(uuid.uuid4()), files=files)

    def names_seen_by(self, address):
        """Return the subject alternative names of the agent's certificate, when it answers."""
        client = Authority(*self.controllers).issue_client("controller", 1)
        pem = self.folder / "client.pem"
        pem.write_bytes(client.bundle().reveal())
        authority = self.folder / "amphorae.pem"
        authority.write_bytes(self.certificate)
        context = ssl.create_default_context(cafile=str(authority))
        context.check_hostname = False
        context.load_cert_chain(pem)

        def ask():
            deadline = time.monotonic() + 20
            while True:
                try:
                    with create_connection((address, PORT), timeout=5) as raw, context.wrap_socket(raw) as secure:
                        return [name for _, name in secure.getpeercert()["subjectAltName"]]
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)

        return namespaces.run_inside(namespaces.path(self.control), ask)

    def left(self, amphora_id):
        """Return the remains of an amphora."""
        spec = str(self.folder / "amphorae" / amphora_id / "spec.json")
        name = self.compute.namespace(amphora_id)
        found = [process.pid for process in find_by_last_argument(spec)] + [
            one.id for one in self.network.ports(amphora_id)
        ]
        found += [path for path in (Path(spec).parent, namespaces.path(name)) if path.exists()]
        return found + self.cables(amphora_id)

    def cables(self, owner):
        def ask(kernel):
            return [
                link.get_attr("IFLA_IFNAME") for link in kernel.get_links() if link.get_attr("IFLA_IFALIAS") == owner
            ]

        return namespaces.run_with_netlink(namespaces.path(f"{self.prefix}-switch"), ask)

    def on_a_bridge(self, port):
        """Return whether the port's cable is attached to its network."""

        def ask(kernel):
            (link,) = kernel.link("get", ifname=bridges.switch_interface_name(port.id))
            return link.get_attr("IFLA_MASTER") is not None and link["state"] == "up"

        return namespaces.run_with_netlink(namespaces.path(f"{self.prefix}-switch"), ask)

    def supervisor(self, amphora_id):
        """Wait for the amphora's first process."""
        process = self.compute._process(amphora_id)
        while not process.children():
            assert not process.wait(0.01)
        return process.children()[0]


@pytest.fixture
def lab(tmp_path):
    with claimed.number(lambda number: not namespaces.names(f"n{number}-")) as number:
        lab = Lab(tmp_path, number)
        try:
            lab.build()
            yield lab
        finally:
            lab.tear_down()
        assert namespaces.names(f"{lab.prefix}-") == []


def test_an_amphora_from_boot_to_deletion(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    assert machine.state is MachineState.RUNNING
    assert lab.names_seen_by(machine.management_address) == [order.amphora_id]
    assert lab.compute.get(order.amphora_id) == machine
    port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
    lab.compute.attach(order.amphora_id, port)
    assert bridges.has_mac(namespaces.path(machine.compute_id), port.mac)
    lab.compute.detach(order.amphora_id, port)
    lab.compute.detach(order.amphora_id, port)
    assert not bridges.has_mac(namespaces.path(machine.compute_id), port.mac)
    lab.network.delete_port(port.id)
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []
    assert lab.compute.get(order.amphora_id) is None
    lab.compute.destroy(order.amphora_id)


def test_a_repeated_boot_creates_one_amphora(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    before = lab.compute._process(order.amphora_id)
    assert lab.compute.boot(order) == machine
    assert lab.compute._process(order.amphora_id) == before
    assert len(lab.cables(order.amphora_id)) == 1


def test_files_are_readable_by_root_only_and_contain_the_address(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    etc = lab.folder / "amphorae" / order.amphora_id / "etc"
    assert f"bind_address = {machine.management_address}" in (etc / "agent.conf").read_text()
    assert {path.stat().st_mode & 0o777 for path in etc.iterdir()} == {0o600}
    assert etc.parent.stat().st_mode & 0o777 == 0o700


def test_an_interface_that_the_agent_moved_is_not_attached_twice(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    lab.names_seen_by(machine.management_address)
    port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
    lab.compute.attach(order.amphora_id, port)
    lab.compute.attach(order.amphora_id, port)
    inner = f"/proc/{lab.supervisor(order.amphora_id).pid}/root/{INNER_NAMESPACE}"

    def move(kernel):
        with Path(inner).open("rb") as namespace:
            kernel.link("set", index=kernel.link_lookup(address=port.mac)[0], net_ns_fd=namespace.fileno())

    namespaces.run_with_netlink(namespaces.path(machine.compute_id), move)
    lab.compute.attach(order.amphora_id, port)
    assert bridges.has_mac(inner, port.mac)
    assert not bridges.has_mac(namespaces.path(machine.compute_id), port.mac)
    assert len(lab.cables(order.amphora_id)) == 2


def test_interrupted_attach_is_completed(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
    script = (
        "import os, signal, sys; from amphora_driver import config; from amphora_driver.network import bridges\n"
        "from amphora_driver.compute.netns import NetnsCompute; from amphora_driver.network.local import LocalNetwork\n"
        "from amphora_driver.database.engine import Database; conf = config.load([sys.argv[1]])\n"
        "network = LocalNetwork(conf, Database(conf.amp_database.connection)); lay = bridges.Switch._create_veth\n"
        "def die(*args): lay(*args); os.kill(os.getpid(), signal.SIGKILL)\n"
        "bridges.Switch._create_veth = die\n"
        "port = next(one for one in network.ports(sys.argv[2]) if one.network_id == 'net')\n"
        "NetnsCompute(conf, network).attach(sys.argv[2], port)\n"
    )
    died = subprocess.run([sys.executable, "-c", script, str(lab.file), order.amphora_id], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert bridges.has_mac(namespaces.path(machine.compute_id), port.mac)
    assert lab.on_a_bridge(port) is False
    lab.compute.attach(order.amphora_id, port)
    assert lab.on_a_bridge(port) is True
    assert len(lab.cables(order.amphora_id)) == 2


def test_a_killed_amphora_is_reported_and_boots_again_with_its_ports(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
    lab.compute.attach(order.amphora_id, port)
    lab.supervisor(order.amphora_id).signal(signal.SIGKILL)
    assert lab.compute._process(order.amphora_id).wait(10)
    assert lab.compute.get(order.amphora_id).state is MachineState.FAILED
    with pytest.raises(ComputeError, match="does not run"):
        lab.compute.attach(order.amphora_id, port)
    assert lab.compute.boot(order) == machine
    lab.compute.attach(order.amphora_id, port)
    assert lab.names_seen_by(machine.management_address) == [order.amphora_id]


def test_all_processes_end_with_the_outermost_one(lab):
    order = lab.order()
    lab.compute.boot(order)
    inside = lab.supervisor(order.amphora_id)
    # unshare(1) arranges for the end of its child in the child, before the child becomes the supervisor.
    while Path(f"/proc/{inside.pid}/cmdline").read_bytes().startswith(b"unshare"):
        assert not inside.wait(0.01)
    lab.compute._process(order.amphora_id).signal(signal.SIGKILL)
    assert inside.wait(10)


def test_an_amphora_is_deleted_during_its_start(lab):
    for _ in range(10):
        order = lab.order()
        lab.compute.boot(order)
        lab.compute.destroy(order.amphora_id)
        assert lab.left(order.amphora_id) == []


def test_a_crash_before_the_process_is_recorded(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    before = lab.compute._process(order.amphora_id)
    folder = lab.folder / "amphorae" / order.amphora_id
    # A process has no arguments during an exec; after its last exec it has a child.
    deadline = time.monotonic() + 30
    while len(find_by_last_argument(str(folder / "spec.json"))) < 2:
        assert time.monotonic() < deadline, "the amphora has two processes"
        time.sleep(0.01)
    (folder / "process.json").unlink()
    assert lab.compute.boot(order) == machine
    assert lab.compute._process(order.amphora_id) == before
    lab.compute.destroy(order.amphora_id)
    assert lab.left(order.amphora_id) == []


def test_a_crash_before_any_process_is_started(lab):
    order = lab.order()
    (lab.folder / "amphorae" / order.amphora_id).mkdir(parents=True)
    assert lab.compute.get(order.amphora_id).state is MachineState.BUILDING
    assert lab.compute.power_on(order.amphora_id) is False
    assert lab.compute.boot(order).state is MachineState.RUNNING


def test_an_amphora_survives_its_controller_and_another_one_deletes_it(lab):
    amphora_id = str(uuid.uuid4())
    script = (
        "import sys; from amphora_driver import config; from amphora_driver.compute.interface import BootRequest\n"
        "from amphora_driver.compute.netns import NetnsCompute; from amphora_driver.network.local import LocalNetwork\n"
        "from amphora_driver.database.engine import Database; conf = config.load([sys.argv[1]])\n"
        "compute = NetnsCompute(conf, LocalNetwork(conf, Database(conf.amp_database.connection)))\n"
        "compute.boot(BootRequest(amphora_id=sys.argv[2], load_balancer_id='x', files={}))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(lab.file), amphora_id], check=True, timeout=60)
    assert lab.compute.get(amphora_id).state is MachineState.RUNNING
    lab.compute.destroy(amphora_id)
    assert lab.left(amphora_id) == []


def test_an_amphora_is_powered_off_and_on(lab):
    order = lab.order()
    machine = lab.compute.boot(order)
    port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
    lab.compute.attach(order.amphora_id, port)
    lab.compute.power_off(order.amphora_id)
    assert not namespaces.exists(machine.compute_id)
    assert lab.cables(order.amphora_id) == []
    assert lab.compute.power_on(order.amphora_id) is True
    assert lab.compute.power_on(order.amphora_id) is False
    assert lab.compute.get(order.amphora_id) == machine
    assert lab.names_seen_by(machine.management_address) == [order.amphora_id]
    assert len(lab.cables(order.amphora_id)) == 2


def test_a_wrong_interpreter_is_named(lab):
    lab.write_configuration("/no/such/python")
    compute = NetnsCompute(lab.conf, lab.network)
    order = lab.order()
    compute.boot(order)
    assert compute._process(order.amphora_id).wait(10)
    machine = compute.get(order.amphora_id)
    assert machine.state is MachineState.FAILED
    assert "/no/such/python" in machine.reason


def test_ids_and_file_names_with_paths_are_refused(lab):
    with pytest.raises(ComputeError, match="not the id of an amphora"):
        lab.compute.destroy("../../etc")
    order = lab.order()
    wrong = BootRequest(amphora_id=order.amphora_id, load_balancer_id="x", files={"../escape": Secret(b"x")})
    with pytest.raises(ComputeError, match="is not the name of a file"):
        lab.compute.boot(wrong)
    assert not (lab.folder / "amphorae" / order.amphora_id / "escape").exists()


def test_several_amphorae_run_side_by_side(lab):
    orders = [lab.order() for _ in range(4)]

    def live(order):
        machine = lab.compute.boot(order)
        port = lab.network.ensure_port(management_port(order.amphora_id, "net", ["v4"]))
        lab.compute.attach(order.amphora_id, port)
        return machine.management_address

    with ThreadPoolExecutor(4) as pool:
        addresses = list(pool.map(live, orders))
        assert len(set(addresses)) == 4
        for order, address in zip(orders, addresses, strict=True):
            assert lab.names_seen_by(address) == [order.amphora_id]
        list(pool.map(lambda order: lab.compute.destroy(order.amphora_id), orders))
    assert [lab.cables(order.amphora_id) for order in orders] == [[]] * 4
