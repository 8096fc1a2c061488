# SPDX-License-Identifier: Apache-2.0
"""A RabbitMQ server for a test: a folder, loopback only, and a separate Erlang name service."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from free_ports import free_ports

_START_SECONDS = 90.0
# Debian's program on PATH changes to another user first; this is the original program.
_SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"


def missing():
    """Return the missing programs, or None."""
    return None if Path(_SERVER).exists() else "needs rabbitmq-server"


@contextmanager
def server(certificate=None):
    """Run a broker inside the block; yield it as a `Broker`.

    `certificate` is a PEM file with certificate and key for `Broker.tls_port`.
    """
    folder = Path(tempfile.mkdtemp(prefix="adr-"))
    broker = Broker(folder, certificate)
    try:
        broker.start()
        yield broker
    finally:
        broker.end()
        shutil.rmtree(folder)


class Broker:
    """One server that can be frozen, killed, and restarted with or without its data."""

    def __init__(self, folder, certificate=None):
        self._folder = folder
        self.port, self._names_port, distribution, self.tls_port = free_ports(4)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"
        self._process = None
        self._names = None
        self._environment = {
            "PATH": "/usr/lib/rabbitmq/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            # Erlang's processes find each other by a name service. The separate port excludes every other name service.
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"amphora-{os.getpid()}-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(distribution),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(folder / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1} +sbwt none",
            # The server itself is then the child process, and not a shell that waits for it.
            "RABBITMQ_ALLOW_INPUT": "1",
        }
        (folder / "plugins").write_text("[].\n")
        lines = ["vm_memory_high_watermark.absolute = 512MB", "disk_free_limit.absolute = 1MB"]
        if certificate is not None:
            lines += [f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}", "ssl_options.verify = verify_none"]
            lines += [f"ssl_options.{name} = {certificate}" for name in ("certfile", "keyfile", "cacertfile")]
        (folder / "rabbitmq.conf").write_text("".join(f"{line}\n" for line in lines))

    def start(self):
        if self._names is None:
            self._names = self._run(["epmd", "-address", "127.0.0.1", "-port", str(self._names_port)], "names")
            self._await(self._names, self._names_port, "names")
        self._process = self._run([_SERVER], "server")
        self._await(self._process, self.port, "server")

    def freeze(self):
        """Stop the server, and wait until each of its threads is stopped: the signal takes effect later."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        end = time.monotonic() + 30
        while running := _running_threads(self._process.pid):
            assert time.monotonic() < end, f"the threads {running} do not stop"
            time.sleep(0.01)

    def thaw(self):
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self):
        """Kill the server (SIGKILL)."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def lose_everything(self):
        """Kill the server, and delete its stored data."""
        self.kill()
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def end(self):
        self.kill()
        if self._names is not None:
            os.killpg(self._names.pid, signal.SIGKILL)
            self._names.wait(30)
            self._names = None

    def _run(self, command, name):
        with (self._folder / f"{name}.out").open("ab") as out:
            # A separate process group: all of Erlang's helpers end with it.
            return subprocess.Popen(
                command, stdout=out, stderr=out, cwd=self._folder, env=self._environment, start_new_session=True
            )

    def _await(self, process, port, name):
        deadline = time.monotonic() + _START_SECONDS
        out = self._folder / f"{name}.out"
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                assert process.poll() is None, out.read_text()
                assert time.monotonic() < deadline, out.read_text()
                time.sleep(0.05)
            else:
                return


def _running_threads(group):
    """Return the threads of a process group that are not stopped (proc(5), /proc/PID/stat)."""
    found = []
    for file in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = file.read_text().rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state not in "TZX":
                found.append(file.parent.name)
    return found
