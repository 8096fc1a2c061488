# SPDX-License-Identifier: Apache-2.0
"""A Galera cluster for a test: MariaDB servers with one database, each in a folder, on loopback only."""

import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import sqlalchemy as sa
from free_ports import free_ports

_START_SECONDS = 90.0
# rsync as root creates files with another user's id, and then cannot write them.
_USER = "nobody"
_PROVIDERS = ("/usr/lib/galera/libgalera_smm.so", "/usr/lib64/galera-4/libgalera_smm.so")


def missing():
    """Return the missing programs, or None."""
    return None if _provider() and shutil.which("rsync") else "needs galera-4 and rsync"


def _command(arguments):
    program = shutil.which("mariadbd") or "/usr/sbin/mariadbd"
    return [program, "--no-defaults", "--skip-networking", *(f"--{name}={value}" for name, value in arguments.items())]


def _provider():
    return next((path for path in _PROVIDERS if Path(path).exists()), None)


@contextmanager
def cluster(name, nodes=2):
    """Run a cluster inside the block; yield the SQLAlchemy URL of one new database for each node."""
    with killable(name, nodes=nodes) as made:
        yield [one.url(name) for one in made]


@contextmanager
def killable(*databases, nodes=3, options=None, cached="32M"):
    """Run a cluster with new databases inside the block; yield its `Node` objects, which can be killed and restarted.

    `options` are options of mariadbd that replace or extend those of a test. `cached` is the size of the write sets
    that a returning node can receive instead of a full copy.
    """
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="adg-"))
        stack.callback(shutil.rmtree, folder)
        shutil.chown(folder, _USER)
        made = [Node(folder, number, options or {}, cached) for number in range(nodes)]
        subprocess.run(
            [
                *("mariadb-install-db", "--no-defaults", f"--datadir={folder}/data0", f"--tmpdir={folder}/tmp0"),
                f"--user={_USER}",
                *("--skip-test-db", "--auth-root-authentication-method=normal"),
            ],
            check=True,
            capture_output=True,
            timeout=120,
        )
        # The second node begins with a copy and receives only newer data, which is faster than a full transfer.
        for one in made:
            stack.callback(one.stop)
            one.start(made[:1] if one.number else [])
        engine = sa.create_engine(made[0].url(""))
        with engine.begin() as connection:
            for name in databases:
                connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        engine.dispose()
        yield made


class Node:
    """One node of a cluster and its failures."""

    def __init__(self, folder, number, options, cached):
        self.folder, self.number = folder, number
        self.socket = folder / f"socket{number}"
        self._gcomm, self._ist, self._sst = free_ports(3)
        self._options, self._cached = options, cached
        self._process = None
        # A server that starts deletes all temporary tables in its temporary folder, also of other servers.
        for name in ("tmp", "data")[: 2 if number else 1]:
            (folder / f"{name}{number}").mkdir()
            shutil.chown(folder / f"{name}{number}", _USER)

    @property
    def pid(self):
        return self._process.pid

    def url(self, database):
        return f"mysql+pymysql://root@localhost/{database}?unix_socket={self.socket}"

    def start(self, others):
        """Start the node, and wait until it has joined the cluster of the other nodes; without any, it makes one.

        A killed node receives only newer data, if it tells its position to the others, as the system service does.
        """
        join = ",".join(f"127.0.0.1:{one._gcomm}" for one in others)
        arguments = self._arguments(join)
        if self._process is not None:
            arguments["wsrep-start-position"] = self._recover(arguments)
        self.socket.unlink(missing_ok=True)
        with (self.folder / f"log{self.number}").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *_command(arguments),
                    *(() if join else ("--wsrep-new-cluster",)),
                ],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                user=_USER,
            )
        self._await()

    def _recover(self, arguments):
        """Return the position of the data after a kill: `UUID:NUMBER`."""
        log = subprocess.run(
            [*_command(arguments), "--wsrep-recover"],
            capture_output=True, text=True, check=True, cwd=self.folder, user=_USER, timeout=_START_SECONDS,
        )  # fmt: skip
        return re.search(r"Recovered position: *(\S+)", log.stderr + log.stdout)[1]

    def _arguments(self, join):
        folder, number = self.folder, self.number
        return {
            "datadir": f"{folder}/data{number}",
            "tmpdir": f"{folder}/tmp{number}",
            "socket": self.socket,
            "pid-file": f"{folder}/pid{number}",
            "binlog-format": "ROW",
            "innodb-autoinc-lock-mode": "2",
            "innodb-flush-log-at-trx-commit": "0",
            "wsrep-on": "ON",
            "wsrep-provider": _provider(),
            "wsrep-cluster-name": folder.name,
            "wsrep-cluster-address": f"gcomm://{join}",
            "wsrep-node-address": "127.0.0.1",
            "wsrep-node-name": f"node{number}",
            "wsrep-sst-method": "rsync",
            "wsrep-sst-receive-address": f"127.0.0.1:{self._sst}",
            "wsrep-provider-options": f"gmcast.listen_addr=tcp://127.0.0.1:{self._gcomm};"
            f"ist.recv_addr=127.0.0.1:{self._ist};gcache.size={self._cached};pc.recovery=FALSE",
            **self._options,
        }

    def kill(self):
        """Kill the server (SIGKILL); the system closes its connections."""
        self._process.kill()
        self._process.wait(60)

    def freeze(self):
        """Suspend the server: it does not answer, and its connections stay open, as after a loss of power."""
        self._process.send_signal(signal.SIGSTOP)

    def is_running(self):
        return self._process is not None and self._process.poll() is None

    def stop(self):
        if not self.is_running():
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)

    def _await(self):
        """Wait until the node has joined the cluster."""
        engine = sa.create_engine(self.url(""), poolclass=sa.NullPool)
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                # The driver leaves its socket open without a server.
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self.socket))
                with engine.connect() as connection:
                    state = connection.exec_driver_sql("SHOW STATUS LIKE 'wsrep_local_state_comment'").one()[1]
                    if state == "Synced":
                        return
            except (OSError, sa.exc.DBAPIError):
                pass
            logs = sorted(self.folder.glob("log*"))
            assert self._process.poll() is None, "".join(one.read_text() for one in logs)
            assert time.monotonic() < deadline, (self.folder / f"log{self.number}").read_text()
            time.sleep(0.1)
