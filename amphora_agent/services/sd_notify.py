# SPDX-License-Identifier: Apache-2.0
"""What a process and the service manager that started it say to each other.

Invariant: what systemd handed over is taken out of the environment before anybody else can take it for its own, and no
program that is started inherits it. Sources: sd_notify(3), sd_listen_fds(3).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from amphora_agent.errors import ServiceError

FIRST_DESCRIPTOR = 3
# Tells what we had kept from what systemd gives of its own accord.
_PREFIX = "kept-"
_LONGEST_NAME = 255
_MOST_KEPT, _LARGEST_LIST = 64, 65536
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Inheritance:
    """What systemd gave a process: where it listens, and what an earlier process had it keep.

    Attributes:
        parcel: holds the descriptors, and is the only one that does: as long as any process has them open, whoever is
            at their other end is held. To be unpacked once, by the process that needs them.
    """

    address: str | None = None
    parcel: socket.socket | None = None

    def unpack(self) -> dict[str, int]:
        """The descriptors by name; nothing if somebody has taken them."""
        if self.parcel is None:
            return {}
        with self.parcel:
            said, descriptors, *_ = socket.recv_fds(self.parcel, _LARGEST_LIST, _MOST_KEPT, socket.MSG_CMSG_CLOEXEC)
        return dict(zip(json.loads(said), descriptors, strict=True))


NOTHING = Inheritance()


def take(environment: MutableMapping[str, str], process: int) -> Inheritance:
    """Take the inheritance of this process, and leave nothing of it in the environment.

    Args:
        process: this process's number; what was meant for another one is not touched.
    """
    address = environment.pop("NOTIFY_SOCKET", None)
    words = [environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")]
    if words[0] != str(process):
        return Inheritance(address)
    numbers = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(words[1] or 0))
    found = dict(zip(map(_name_of, words[2].split(":")), numbers, strict=False))
    found.pop(None, None)
    parcel = _packed({str(name): number for name, number in found.items()})
    for number in numbers:
        os.close(number)
    return Inheritance(address, parcel)


def _packed(descriptors: Mapping[str, int]) -> socket.socket | None:
    if not descriptors:
        return None
    writer, parcel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with writer:
        socket.send_fds(writer, [json.dumps(list(descriptors)).encode()], list(descriptors.values()))
    return parcel


def _written(name: str) -> str:
    """A name as systemd takes it: of ASCII that can be seen, without colons (sd_notify(3), FDNAME)."""
    written = _PREFIX + quote(name, safe="")
    if len(written) > _LONGEST_NAME:
        raise ServiceError(f"have {name} kept", "its name is too long")
    return written


def _name_of(written: str) -> str | None:
    return unquote(written[len(_PREFIX) :]) if written.startswith(_PREFIX) else None


def ready(inheritance: Inheritance) -> None:
    """Say that this process serves now; nothing if nobody waits for it."""
    if inheritance.address is not None:
        send(inheritance.address, "READY=1")


def store(address: str, name: str, descriptor: int) -> None:
    """Have a descriptor kept beyond this process, also if nobody listens at its other end any more.

    Raises:
        ServiceError: nobody took it.
    """
    send(address, f"FDSTORE=1\nFDPOLL=0\nFDNAME={_written(name)}", [descriptor])
    _settle(address)


def remove(address: str, name: str) -> None:
    """Have what is kept under a name closed.

    Raises:
        ServiceError: nobody heard it.
    """
    send(address, f"FDSTOREREMOVE=1\nFDNAME={_written(name)}")


def send(address: str, text: str, descriptors: Sequence[int] = ()) -> None:
    """Say one thing.

    Raises:
        ServiceError: nobody listens.
    """
    place = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(place)
            socket.send_fds(connection, [text.encode()], list(descriptors))
    except OSError as error:
        raise ServiceError("tell systemd something", f"it does not listen: {error}") from error


def _settle(address: str) -> None:
    """Wait until everything that was said has been heard: then this process may die and it still holds."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send(address, "BARRIER=1", [theirs.fileno()])
        ours.settimeout(ANSWER_SECONDS)
        try:
            ours.recv(1)  # it closes its end when it has come that far
        except OSError as error:
            raise ServiceError("tell systemd something", f"it does not answer: {error}") from error
