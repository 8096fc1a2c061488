# SPDX-License-Identifier: Apache-2.0
"""A Galera cluster for a test: MariaDB servers with one database, each in a folder, on loopback only."""

import shutil
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


def _provider():
    return next((path for path in _PROVIDERS if Path(path).exists()), None)


@contextmanager
def cluster(name, nodes=2):
    """Run a cluster inside the block; yield the SQLAlchemy URL of one new database for each node."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="adg-"))
        stack.callback(shutil.rmtree, folder)
        # A server that starts deletes all temporary tables in its temporary folder, also of other servers.
        for number in range(nodes):
            (folder / f"tmp{number}").mkdir()
            shutil.chown(folder / f"tmp{number}", _USER)
        shutil.chown(folder, _USER)
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
        first = free_ports(3)
        # The second node begins with a copy and receives only newer data, which is faster than a full transfer.
        for number in range(nodes):
            ports = first if number == 0 else free_ports(3)
            if number:
                (folder / f"data{number}").mkdir()
                shutil.chown(folder / f"data{number}", _USER)
            join = f"127.0.0.1:{first[0]}" if number else ""
            stack.enter_context(_node(folder, number, ports, join))
        engine = sa.create_engine(_url(folder, 0, ""))
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        engine.dispose()
        yield [_url(folder, number, name) for number in range(nodes)]


@contextmanager
def _node(folder, number, ports, join):
    gcomm, ist, sst = ports
    options = {
        "datadir": f"{folder}/data{number}",
        "tmpdir": f"{folder}/tmp{number}",
        "socket": f"{folder}/socket{number}",
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
        "wsrep-sst-receive-address": f"127.0.0.1:{sst}",
        "wsrep-provider-options": f"gmcast.listen_addr=tcp://127.0.0.1:{gcomm};ist.recv_addr=127.0.0.1:{ist};"
        "gcache.size=32M;pc.recovery=FALSE",
    }
    with (folder / f"log{number}").open("wb") as log:
        process = subprocess.Popen(
            [
                *(shutil.which("mariadbd") or "/usr/sbin/mariadbd", "--no-defaults", "--skip-networking"),
                *(f"--{name}={value}" for name, value in options.items()),
                *(() if join else ("--wsrep-new-cluster",)),
            ],
            stdout=log,
            stderr=log,
            cwd=folder,
            user=_USER,
        )
    try:
        _await(process, folder, number)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _url(folder, number, name):
    return f"mysql+pymysql://root@localhost/{name}?unix_socket={folder}/socket{number}"


def _await(process, folder, number):
    """Wait until the node has joined the cluster."""
    engine = sa.create_engine(_url(folder, number, ""), poolclass=sa.NullPool)
    deadline = time.monotonic() + _START_SECONDS
    log = folder / f"log{number}"
    while True:
        try:
            # The driver leaves its socket open without a server.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{folder}/socket{number}")
            with engine.connect() as connection:
                state = connection.exec_driver_sql("SHOW STATUS LIKE 'wsrep_local_state_comment'").one()[1]
                if state == "Synced":
                    return
        except (OSError, sa.exc.DBAPIError):
            pass
        assert process.poll() is None, "".join(one.read_text() for one in sorted(folder.glob("log*")))
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
