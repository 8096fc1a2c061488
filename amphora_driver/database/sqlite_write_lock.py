# SPDX-License-Identifier: Apache-2.0
"""One SQLite file, and the writers who take turns with it.

Two writers would fight: a reader cannot become a writer, and the busy handler starves. So a file lock beside the
database lets them queue, those of all processes; who has the turn begins with BEGIN IMMEDIATE.

Invariant: nobody waits for a turn without limit. Whoever has it may stand still (a debugger, a frozen host, SIGSTOP),
and then it is better to hear no, and who it is, than to hang with him.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from amphora_driver.errors import StoreError

if TYPE_CHECKING:
    import sqlalchemy as sa

_TURN = "amphora_turn"


class Queue:
    """Lets the writers of one file go one after the other.

    Args:
        path: the file.
        durable: whether a commit must survive a power cut.
        patience: seconds to wait for one's turn.
    """

    def __init__(self, path: str, *, durable: bool, patience: float) -> None:
        self._turns = Turns(f"{path}.lock")
        self._durable = durable
        self._patience = patience
        Path(path).parent.mkdir(parents=True, exist_ok=True)

    def listen(self, engine: sa.Engine) -> None:
        """Have all that an engine writes wait for its turn."""
        event.listen(engine, "connect", self._connect)
        event.listen(engine, "begin", self._begin)
        # A connection goes back to the pool right after its COMMIT or ROLLBACK: the turn of the next writer.
        event.listen(engine, "checkin", self._checkin)

    def _connect(self, dbapi_connection: Any, _record: Any) -> None:
        # The driver must not begin transactions of its own: _begin does.
        dbapi_connection.isolation_level = None
        cursor = dbapi_connection.cursor()
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    def _begin(self, connection: sa.Connection) -> None:
        if connection.get_execution_options().get("amphora_read_only"):
            connection.exec_driver_sql("BEGIN DEFERRED")
            return
        if _TURN not in connection.info:
            # Several transactions of one connection, one after the other (a migration each), are one turn.
            connection.info[_TURN] = self._turns.take(self._patience)
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _checkin(self, _dbapi_connection: Any, record: Any) -> None:
        turn = record.info.pop(_TURN, None)
        if turn is not None:
            os.close(turn)


class Turns:
    """Turns to write, as locks of one file: a turn is a descriptor, and over when that is closed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._changing = threading.Lock()
        # Of those who stopped waiting: the kernel takes nobody out of its queue. Who comes next waits there.
        self._given_up: list[_Place] = []

    def take(self, patience: float) -> int:
        """Wait for a turn.

        Args:
            patience: seconds.

        Raises:
            StoreError: it did not come, or the file system has none.
        """
        try:
            return self._take(patience)
        except OSError as error:
            raise StoreError("write to the database", f"{self._path}: {error.strerror}") from error

    def _take(self, patience: float) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._wait(descriptor, patience)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _wait(self, descriptor: int, patience: float) -> int:
        """The lock can be waited for with a limit only by somebody else."""
        with self._changing:
            place = self._given_up.pop() if self._given_up else None
        if place is None:
            place = _Place(descriptor)
            try:
                threading.Thread(target=self._stand, args=(place,), name="turn to write", daemon=True).start()
            except BaseException:
                os.close(descriptor)
                raise
        else:
            os.close(descriptor)
        try:
            came = place.over.wait(patience)
        except BaseException:
            if not self._leave(place):
                os.close(place.descriptor)
            raise
        if not came and self._leave(place):
            raise StoreError("write to the database", self._why_not(patience))
        if place.error is not None:
            os.close(place.descriptor)
            raise place.error
        return place.descriptor

    def _leave(self, place: _Place) -> bool:
        """Stop waiting; False if the turn has come in the last moment."""
        with self._changing:
            if place.over.is_set():
                return False
            self._given_up.append(place)
            return True

    def _stand(self, place: _Place) -> None:
        """In line, until it is our turn; and let the next one go if nobody wants it any more."""
        try:
            fcntl.flock(place.descriptor, fcntl.LOCK_EX)
        except OSError as error:
            place.error = error
        with self._changing:
            if place in self._given_up:
                self._given_up.remove(place)
                os.close(place.descriptor)
            else:
                place.over.set()

    def _why_not(self, patience: float) -> str:
        holder = _holder(self._path)
        who = "another process has it" if holder is None else f"process {holder} has it"
        return f"in {patience:.0f} s our turn did not come: {who}, and may stand still"


class _Place:
    """A place in the queue."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.over = threading.Event()
        self.error: OSError | None = None


def _holder(path: str) -> str | None:
    """Who has a file locked, as "number (name)"; None where the kernel does not tell (proc_locks(5))."""
    with suppress(OSError):
        inode = str(Path(path).stat().st_ino)
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  WRITE 1234 00:1f:5678 0 EOF; who waits has an arrow after the number.
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode:
                name = Path("/proc", words[4], "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{words[4]} ({name})"
    return None
