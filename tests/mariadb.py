# SPDX-License-Identifier: Apache-2.0
"""A MariaDB server for a test: a folder, a Unix socket, no network."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

_START_SECONDS = 60.0


@contextmanager
def server(*databases):
    """Run a server inside the block; yield SQLAlchemy URLs of new databases with these names."""
    with killable(*databases) as made:
        yield made.urls


@contextmanager
def copied(data, *databases):
    """Run a server on a copy of the data directory of a stopped one; yield the URLs of its databases."""
    folder = Path(tempfile.mkdtemp(prefix="adm-"))
    made = Server(folder, databases)
    try:
        subprocess.run(["cp", "-a", "--reflink=auto", "--sparse=always", data, folder / "data"], check=True)
        made.start()
        yield made.urls
    finally:
        made.stop()
        shutil.rmtree(folder)


@contextmanager
def killable(*databases, environment=None):
    """Run a `Server` inside the block; a test can freeze, kill and restart it.

    `environment` extends the environment of the server.
    """
    folder = Path(tempfile.mkdtemp(prefix="adm-"))
    made = Server(folder, databases, environment)
    try:
        made.install()
        made.start()
        engine = sa.create_engine(_url(folder, ""))
        with engine.begin() as connection:
            for name in databases:
                connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        engine.dispose()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder)


class Server:
    """One server and its failures."""

    def __init__(self, folder, databases, environment=None):
        self.urls = [_url(folder, name) for name in databases]
        self.data = folder / "data"
        self._folder = folder
        # A server that starts deletes all temporary tables in its temporary folder, also of other servers.
        (folder / "tmp").mkdir()
        # MariaDB accepts `--no-defaults` only as its first argument.
        self._common = ["--no-defaults", f"--datadir={folder}/data", f"--tmpdir={folder}/tmp", "--user=root"]
        self._environment = {**os.environ, **(environment or {})}
        self._process = None

    def install(self):
        subprocess.run(
            ["mariadb-install-db", *self._common, "--skip-test-db", "--auth-root-authentication-method=normal"],
            check=True,
            capture_output=True,
            timeout=120,
        )

    def start(self):
        """Start the server; wait until it accepts queries."""
        folder = self._folder
        (folder / "socket").unlink(missing_ok=True)
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(_daemon(), *self._common, "--skip-networking", f"--socket={folder}/socket"),
                    f"--pid-file={folder}/pid",
                    # A commit survives a kill of the server, but not a power cut.
                    "--innodb-flush-log-at-trx-commit=2",
                ],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        _await(self._process, folder)

    def kill(self):
        """Kill the server (SIGKILL): after a restart it has exactly its commits."""
        self._process.kill()
        self._process.wait(60)

    def freeze(self):
        """Suspend the server: it does not answer, and its connections stay open, as in a network failure."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self._process.send_signal(signal.SIGCONT)

    def stop(self):
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            self._process.terminate()
            self._process.wait(60)


def version():
    """Return the version of the server."""
    return subprocess.run([_daemon(), "--version"], capture_output=True, text=True, check=True).stdout


def _daemon():
    return shutil.which("mariadbd") or "/usr/sbin/mariadbd"


def _url(folder, name):
    return f"mysql+pymysql://root@localhost/{name}?unix_socket={folder}/socket"


def _await(process, folder):
    deadline = time.monotonic() + _START_SECONDS
    while not (folder / "socket").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
