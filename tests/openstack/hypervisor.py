# SPDX-License-Identifier: Apache-2.0
"""The hypervisor of all compute hosts: amphorae in network namespaces, as `amphora_driver/compute/netns.py` runs them.

Invariant: one thread handles one request after the other. It starts the guests, which end with it. A guest gets only
what Nova gives it: the config drive, which the image's own reader interprets, and interfaces.

    hypervisor.py SOCKET PREFIX FOLDER AGENT-PYTHON

Requests are JSON objects (`plugins/lab_socket.py`), from the virt driver, the ML2 driver and the tests.
"""

from __future__ import annotations

import configparser
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from hypervisor_switch import CloudSwitch

from amphora_agent import cloud_network, config_drive
from amphora_agent.errors import SettingsError
from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import signal_and_wait
from amphora_driver.network import bridges

MANAGEMENT_INTERFACE = "eth0"
_KILL_SECONDS = 10.0
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
        if not (self.folder / "spec.json").exists():
            return
        argv = [
            *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net={namespaces.path(self.name)}", "--"),
            *("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--uts", "--ipc"),
            *("--propagation", "private", "--mount-proc", "--wd=/", "--"),
            *(self._python, "-m", "amphora_agent.services.supervisor", str(self.folder / "spec.json")),
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
            self._process.wait(_KILL_SECONDS)
            self._process = None
        assert signal_and_wait(namespaces.processes(self.name), signal.SIGKILL, _KILL_SECONDS), "a process remains"

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


class Hypervisor:
    """Handles requests: each method `on_VERB` takes the keys of a request, and returns the keys of the answer."""

    def __init__(self, prefix, folder, python):
        self._prefix = prefix
        self._folder = folder
        self._python = python
        self._switch = CloudSwitch(f"{prefix}-switch")
        self._guests = {}
        self._hosts = set()
        self._refusals = []

    def on_admit(self):
        """Refuse a boot if a test asks for it; the boot of a server without a guest ends after this request."""
        if self._refusals:
            raise ValueError(self._refusals.pop(0))
        return {}

    def on_spawn(self, server, drive, ports, host):
        self.on_admit()
        if drive is None:
            raise ValueError("the server has no config drive")
        name = f"{self._prefix}-{server[:8]}"
        guest = Guest(name, self._folder / server, self._python, self._switch)
        try:
            guest.boot(drive, ports)
        except BaseException:
            guest.remove()
            raise
        self._guests[server] = guest
        return {"namespace": name, "host": host}

    def on_destroy(self, server, host):
        guest = self._guests.pop(server, None)
        if guest is not None:
            guest.remove()
        return {"host": host}

    def on_attach(self, server, port, host):
        self._guests[server].attach(port)
        return {"host": host}

    def on_detach(self, server, port_id, host):
        if server in self._guests:
            self._guests[server].detach(port_id)
        return {"host": host}

    def on_power_off(self, server, host=None):
        self._guests[server].kill()
        return {"host": host}

    def on_power_on(self, server, host=None):
        self._guests[server].start()
        return {"host": host}

    def on_console(self, server, host=None):
        return {"host": host, "text": self._guests[server].console()}

    def on_port(self, port, mtu):
        self._switch.state(port)
        return {"mtu": mtu}

    def on_plug(self, name, port, routes=()):
        """Connect a host of the tests with a port: a namespace with the interface `eth0`."""
        namespaces.ensure(name)
        self._hosts.add(name)
        self._switch.plug(port, name, namespaces.path(name), "eth0")
        configure(name, "eth0", [(one["address"], one["prefix"]) for one in port["addresses"]], ())
        return {"routes": list(routes)}

    def on_refuse(self, reasons):
        """Let the next boots fail with these reasons."""
        self._refusals += reasons
        return {}

    def on_guests(self):
        """The namespaces of all guests by server."""
        return {server: guest.name for server, guest in self._guests.items()}

    def remove_everything(self):
        for guest in self._guests.values():
            guest.remove()
        for name in self._hosts:
            signal_and_wait(namespaces.processes(name), signal.SIGKILL, _KILL_SECONDS)
        for name in namespaces.names(f"{self._prefix}-"):
            namespaces.remove(name)


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


def _serve(path, hypervisor):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            connection, _ = listener.accept()
            with connection:
                with connection.makefile("rb") as request:
                    told = json.load(request)
                begun = time.monotonic()
                verb = told.pop("verb")
                try:
                    answer = getattr(hypervisor, f"on_{verb}")(**told)
                except Exception as error:  # noqa: BLE001 - the answer and the log have it
                    traceback.print_exc()
                    answer = {"error": f"{type(error).__name__}: {error}"}
                used = 1000 * (time.monotonic() - begun)
                sys.stdout.write(f"{time.strftime('%H:%M:%S')} {verb} in {used:.0f} ms: {told}\n")
                sys.stdout.flush()
                connection.sendall(json.dumps(answer).encode())


def _exit(*_):
    raise SystemExit


def main():
    """Serve until SIGTERM."""
    path, prefix, folder, python = sys.argv[1:]
    hypervisor = Hypervisor(prefix, Path(folder), python)
    signal.signal(signal.SIGTERM, _exit)
    try:
        _serve(path, hypervisor)
    finally:
        hypervisor.remove_everything()


if __name__ == "__main__":
    main()
