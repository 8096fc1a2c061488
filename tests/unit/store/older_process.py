# SPDX-License-Identifier: Apache-2.0
"""A process of an older version that writes without a pause during an upgrade of the schema and after it."""

import shutil
import threading
from contextlib import contextmanager

import msgspec
import sqlalchemy as sa
from test_two_schema_versions import start_at

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database

_PATIENCE = 60


class OlderProcess:
    """The process, as a thread. `statements` are all that it has sent."""

    def __init__(self, url, revision, database):
        self.database = database
        self.statements = set()
        self._url, self._revision = url, revision
        self._rounds = threading.Semaphore(0)
        self._stopped = threading.Event()
        self._failure = None
        sa.event.listen(database.engine, "before_cursor_execute", lambda *event: self.statements.add(event[2]))

    def run(self, write):
        """Call `write` with the numbers 0, 1, 2 and so on, and upgrade the schema meanwhile."""
        thread = threading.Thread(target=self._write_all, args=(write,), name="older")
        thread.start()
        try:
            self._await_rounds(5)
            assert migrate.upgrade(self._url).before == self._revision
            while self._rounds.acquire(blocking=False):
                pass
            self._await_rounds(20)
        finally:
            self._stopped.set()
            thread.join()
        assert self._failure is None, self._failure

    def _await_rounds(self, number):
        for _ in range(number):
            assert self._rounds.acquire(timeout=_PATIENCE)

    def _write_all(self, write):
        number = 0
        try:
            while not self._stopped.is_set():
                write(number)
                number += 1
                self._rounds.release()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failure = error
            self._rounds.release(1000)


@contextmanager
def older_process(url, folder, revision):
    """Create the schema of a revision in an empty database; yield a process of the version with this revision.

    `folder` receives the migrations up to the revision, which are those that the version knows.
    """
    start_at(url, revision)
    shutil.copytree(schema_check.DRIVER.migrations, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.glob("versions/[0-9]*.py"):
        if file.name > f"{revision}~":
            file.unlink()
    database = Database(url, schema=msgspec.structs.replace(schema_check.DRIVER, migrations=folder))
    try:
        yield OlderProcess(url, revision, database)
    finally:
        database.dispose()
