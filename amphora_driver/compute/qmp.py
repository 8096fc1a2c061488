# SPDX-License-Identifier: Apache-2.0
"""The monitor of a running QEMU (QEMU Machine Protocol).

Invariant: QEMU accepts one connection at a time, and the caller has the lock on the amphora's directory. Every wait has
a time-out: a frozen machine delays its own caller only. The socket path goes through a descriptor of the directory, so
that the path of the directory may have any length.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from amphora_driver.deadline import limit_wait
from amphora_driver.errors import ComputeError

SOCKET = "monitor"
_SECONDS = 10.0
_PAUSE = 0.05


class Monitor:
    """An open connection; created by `open_monitor`."""

    def __init__(self, connection: socket.socket, wanted: str) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._wanted = wanted
        self._read_message()
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: Any) -> Any:
        """Execute a command; return QEMU's result.

        Raises:
            ComputeError: QEMU refuses the command.
        """
        self._connection.sendall(_line(command, arguments))
        return self._read_response(command)

    def send_descriptor(self, descriptor: int, name: str) -> None:
        """Pass a file descriptor to qemu under a name (QMP `getfd`; unix(7), SCM_RIGHTS).

        Raises:
            ComputeError: QEMU refuses it.
        """
        socket.send_fds(self._connection, [_line("getfd", {"fdname": name})], [descriptor])
        self._read_response("getfd")

    def _read_response(self, command: str) -> Any:
        while True:
            answer = self._read_message()
            if "error" in answer:
                raise ComputeError(self._wanted, f"QEMU refuses {command}: {answer['error'].get('desc', 'no reason')}")
            if "return" in answer:
                return answer["return"]

    def device_ids(self) -> frozenset[str]:
        found = self.execute("qom-list", path="/machine/peripheral")
        return frozenset(one["name"] for one in found if one["type"].startswith("child<"))

    def try_execute(self, command: str, **arguments: Any) -> bool:
        try:
            self.execute(command, **arguments)
        except ComputeError:
            return False
        return True

    def wait_until_removed(self, device: str, seconds: float) -> bool:
        """Wait until the guest has released a device; return False after the time-out."""
        deadline = time.monotonic() + seconds
        while device in self.device_ids():
            if time.monotonic() > deadline:
                return False
            time.sleep(limit_wait(_PAUSE))
        return True

    def close(self) -> None:
        self._lines.close()

    def _read_message(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ConnectionResetError("QEMU closed the connection")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _line(command: str, arguments: dict[str, Any]) -> bytes:
    return json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"


@contextmanager
def open_monitor(folder: Path, wanted: str) -> Iterator[Monitor]:
    """Connect to the QEMU whose monitor socket is in this directory.

    Raises:
        ComputeError: QEMU does not answer within the time-out.
    """
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(limit_wait(_SECONDS))
            _connect(connection, f"/proc/self/fd/{place}/{SOCKET}")
            with closing(Monitor(connection, wanted)) as monitor:
                yield monitor
    except (OSError, ValueError) as error:
        raise ComputeError(wanted, f"QEMU does not answer: {error}") from error
    finally:
        os.close(place)


def _connect(connection: socket.socket, path: str) -> None:
    """Connect; retry while a QEMU that has just started has no socket yet."""
    deadline = time.monotonic() + (connection.gettimeout() or 0.0)
    while True:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(path)
            return
        if time.monotonic() > deadline:
            raise TimeoutError("its monitor socket does not exist or refuses connections")
        time.sleep(limit_wait(_PAUSE))
