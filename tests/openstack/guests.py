# SPDX-License-Identifier: Apache-2.0
"""The guests of the hypervisor: amphorae of this project, and amphorae of Octavia's own provider.

Invariant: a guest gets only what Nova gives it: the config drive and interfaces.
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from amphora_agent import cloud_network, config_drive
from amphora_agent.errors import SettingsError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import signal_and_wait
from amphora_driver.network import bridges

MANAGEMENT_INTERFACE = "eth0"
# The name of the image whose servers are amphorae of Octavia's own provider.
INCUMBENT_IMAGE = "incumbent"
KILL_SECONDS = 10.0
_CONSOLE_BYTES = 64 * 1024


class Guest:
    """One server: its namespace, its files, its interfaces and its outermost process."""

    def __init__(self, name, folder, python, switch):
        self.name = name
        self.folder = folder
        self.ports = []
        self._python = python
        self._switch = switch
        self._network = None
        self._process = None

    def boot(self, drive, ports):
        """Plug the interfaces and start the guest. A guest that finds no files of an amphora runs without a process."""
        self.folder.mkdir()
        namespaces.ensure(self.name)
        self.ports = list(ports)
        try:
            self._read(drive)
        except SettingsError as error:
            # As a machine does: Nova does not learn of it.
            (self.folder / "console.log").write_text(f"amphora: {error}\n")
        self.start()

    def _read(self, drive):
        """Write the files of the config drive as the image does, and the specification of the supervisor."""
        descriptor = os.open(drive, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            told = config_drive.read(descriptor)
        finally:
            os.close(descriptor)
        places = config_drive.Places(self.folder)
        config_drive.write_files(places, told)
        self._network = cloud_network.management(told.network, _bind_address(told.files))
        if "agent.conf" in told.files:
            (self.folder / "var").mkdir()
            spec = {"hostname": told.hostname or self.name, "etc": str(places.files), "var": str(self.folder / "var")}
            (self.folder / "spec.json").write_text(json.dumps({**spec, "python": self._python}))

    def start(self):
        """Plug all interfaces and start the first process of the guest."""
        first = self._network.mac if self._network else None
        for port in self.ports:
            self._plug(port, MANAGEMENT_INTERFACE if port["mac"] == first else None)
            if port["mac"] == first:
                self._configure(port)
        if not self._has_files():
            return
        argv = [
            *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={namespaces.path(self.name)}", "--"),
            *("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--uts", "--ipc"),
            *("--propagation", "private", "--mount-proc", "--wd=/", "--"),
            *self._program(),
        ]
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
        kept = {name: os.environ[name] for name in names if name in os.environ}
        with (self.folder / "console.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**kept, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"},
            )

    def _has_files(self):
        return (self.folder / "spec.json").exists()

    def _program(self):
        """The first process of the guest."""
        return self._python, "-m", "amphora_agent.services.supervisor", str(self.folder / "spec.json")

    def attach(self, port):
        self.ports.append(port)
        self._plug(port, None)

    def detach(self, port_id):
        self.ports = [port for port in self.ports if port["id"] != port_id]
        self._switch.unplug(port_id)

    def kill(self):
        """End all processes at once, as a power failure does; interfaces of the inner namespace are lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(KILL_SECONDS)
            self._process = None
        assert signal_and_wait(namespaces.processes(self.name), signal.SIGKILL, KILL_SECONDS), "a process remains"

    def remove(self):
        self.kill()
        for port in self.ports:
            self._switch.unplug(port["id"])
        namespaces.remove(self.name)
        if self.folder.exists():
            # Nova may boot a server with this id again. The console may explain a failure.
            self.folder.rename(self.folder.with_name(f"{self.folder.name}.{time.monotonic_ns()}"))

    def console(self):
        path = self.folder / "console.log"
        return path.read_bytes()[-_CONSOLE_BYTES:].decode(errors="replace") if path.exists() else ""

    def _plug(self, port, interface):
        self._switch.plug(port, self.name, namespaces.path(self.name), interface)

    def _configure(self, port):
        """Configure the management interface as systemd-networkd does; the port's addresses stand for DHCP."""
        addresses = [(str(one.ip), one.network.prefixlen) for one in self._network.addresses]
        if self._network.dhcp:
            addresses += [(one["address"], one["prefix"]) for one in port["addresses"]]
        configure(self.name, MANAGEMENT_INTERFACE, addresses, self._network.routes)


class IncumbentGuest(Guest):
    """An amphora of Octavia's own provider, with the agent of the package `octavia` (`incumbent_guest.py`)."""

    def _read(self, drive):
        latest = Path(drive, "openstack/latest")
        meta = json.loads((latest / "meta_data.json").read_text())
        for one in meta.get("files", ()):
            place = self.folder / "root" / one["path"].lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch(mode=0o600)
            place.write_bytes(Path(drive, "openstack", one["content_path"].lstrip("/")).read_bytes())
        self._network = cloud_network.management(json.loads((latest / "network_data.json").read_text()), None)

    def _has_files(self):
        return (self.folder / "root/etc/octavia/amphora-agent.conf").exists()

    def _program(self):
        program = Path(__file__).with_name("incumbent_guest.py")
        return sys.executable, "-I", "-S", str(program), str(self.folder), str(Path(sys.executable).parent)


def configure(name, interface, addresses, routes):
    """Set addresses and routes of an interface in a namespace, and its state to up."""

    def work(kernel):
        index = kernel.link_lookup(ifname=interface)[0]
        kernel.link("set", index=index, state="up")
        for address, prefix in addresses:
            bridges.add_address(kernel, index, address, prefix)
        for route in routes:
            kernel.route("replace", dst=str(route.destination), gateway=str(route.gateway), oif=index)

    namespaces.run_with_netlink(namespaces.path(name), work)


def _bind_address(files):
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(files.get("agent.conf", b"").decode())
    return parser.get("agent", "bind_address", fallback=None)
