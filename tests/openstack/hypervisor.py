# SPDX-License-Identifier: Apache-2.0
"""The hypervisor of all compute hosts: amphorae in network namespaces, as `amphora_driver/compute/netns.py` runs them.

Invariant: one thread handles one request after the other. It starts the guests, which end with it. A guest gets only
what Nova gives it: the config drive, which the image's own reader interprets, and interfaces.

    hypervisor.py SOCKET PREFIX FOLDER AGENT-PYTHON

Requests are JSON objects (`plugins/lab_socket.py`), from the virt driver, the ML2 driver and the tests.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from guests import INCUMBENT_IMAGE, KILL_SECONDS, Guest, IncumbentGuest, configure
from hypervisor_switch import CloudSwitch

from amphora_driver.host import namespaces
from amphora_driver.host.detached_process import signal_and_wait


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

    def on_spawn(self, server, drive, ports, host, image=None):
        self.on_admit()
        if drive is None:
            raise ValueError("the server has no config drive")
        name = f"{self._prefix}-{server[:8]}"
        made = IncumbentGuest if image == INCUMBENT_IMAGE else Guest
        guest = made(name, self._folder / server, self._python, self._switch)
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
        self._switch.state({**port, "mtu": mtu})
        return {"mtu": mtu}

    def on_plug_tap(self, name):
        """Connect a tap of Nova's libvirt driver."""
        self._switch.plug_tap(name)
        return {}

    def on_forget_tap(self, name):
        """Take the removal of a tap."""
        self._switch.forget_tap(name)
        return {}

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
            signal_and_wait(namespaces.processes(name), signal.SIGKILL, KILL_SECONDS)
        for name in namespaces.names(f"{self._prefix}-"):
            namespaces.remove(name)


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
