# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL server for a test: a folder, a Unix socket, no network."""

import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

_START_SECONDS = 60.0
# PostgreSQL refuses to run as root.
_USER = "nobody"


def missing():
    """Return the missing programs, or None."""
    return None if _folder() else "needs PostgreSQL"


def _folder():
    """Return the folder of the programs, which Debian installs for each version and not on PATH."""
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


@contextmanager
def server(*databases):
    """Run a server inside the block; yield SQLAlchemy URLs of new databases with these names."""
    programs = _folder()
    folder = Path(tempfile.mkdtemp(prefix="adp-"))
    shutil.chown(folder, _USER)
    process = None
    try:
        subprocess.run(
            [f"{programs}/initdb", "-D", f"{folder}/data", "-U", "root", "-A", "trust", "-E", "UTF8", "--no-sync"],
            check=True,
            capture_output=True,
            timeout=120,
            user=_USER,
            cwd=folder,
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(f"{programs}/postgres", "-D", f"{folder}/data", "-k", str(folder), "-h", ""),
                    # The data need not survive a power cut.
                    *("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=300"),
                ],
                stdout=log,
                stderr=log,
                user=_USER,
                cwd=folder,
            )
        engine = sa.create_engine(_url(folder, "postgres"), isolation_level="AUTOCOMMIT")
        with _connected(engine, process, folder) as connection:
            for name in databases:
                connection.exec_driver_sql(f"CREATE DATABASE {name}")
        engine.dispose()
        yield [_url(folder, name) for name in databases]
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
        shutil.rmtree(folder)


def _url(folder, name):
    return f"postgresql+psycopg://root@/{name}?host={folder}"


def _connected(engine, process, folder):
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return engine.connect()
        except sa.exc.OperationalError:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
