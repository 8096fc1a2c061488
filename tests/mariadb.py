# SPDX-License-Identifier: Apache-2.0
"""A MariaDB server of a test's own: a folder, a unix socket, no network."""

import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

_START_SECONDS = 60.0


@contextmanager
def server(*databases):
    """Runs while the block does; yields SQLAlchemy URLs of new databases with these names."""
    folder = Path(tempfile.mkdtemp(prefix="adm-"))
    # The first option has to be the first: MariaDB insists.
    common = ["--no-defaults", f"--datadir={folder}/data", "--user=root"]
    daemon = shutil.which("mariadbd") or "/usr/sbin/mariadbd"
    process = None
    try:
        subprocess.run(
            ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"],
            check=True,
            capture_output=True,
            timeout=120,
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(daemon, *common, "--skip-networking", f"--socket={folder}/socket", f"--pid-file={folder}/pid"),
                    # Nothing of it has to survive a power cut.
                    "--innodb-flush-log-at-trx-commit=0",
                ],
                stdout=log,
                stderr=log,
            )
        _await(process, folder)
        engine = sa.create_engine(_url(folder, ""))
        with engine.begin() as connection:
            for name in databases:
                connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        engine.dispose()
        yield [_url(folder, name) for name in databases]
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
        shutil.rmtree(folder)


def _url(folder, name):
    return f"mysql+pymysql://root@localhost/{name}?unix_socket={folder}/socket"


def _await(process, folder):
    deadline = time.monotonic() + _START_SECONDS
    while not (folder / "socket").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
