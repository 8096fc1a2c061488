# SPDX-License-Identifier: Apache-2.0
"""Notifications and stored descriptors of systemd (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from amphora_agent.errors import ServiceError

FIRST_DESCRIPTOR = 3
# The agent stores its descriptors in systemd under names with this prefix. Descriptors of socket units have no such
# prefix.
_PREFIX = "kept-"
_LONGEST_NAME = 255
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Inherited:
    """What systemd passed to this process.

    ``address`` is systemd's notification socket; None without systemd. ``descriptors`` are the stored descriptors by
    name. The service manager of the agent closes them.
    """

    address: str | None = None
    descriptors: Mapping[str, int] = field(default_factory=dict)


NOTHING_INHERITED = Inherited()


def take_inherited(environment: MutableMapping[str, str], process: int) -> Inherited:
    """Return what systemd passed to this process, and remove it from the environment."""
    address = environment.pop("NOTIFY_SOCKET", None)
    words = [environment.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")]
    if words[0] != str(process):
        return Inherited(address)
    numbers = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(words[1] or 0))
    found = zip(words[2].split(":"), numbers, strict=False)
    kept = {unquote(name[len(_PREFIX) :]): number for name, number in found if name.startswith(_PREFIX)}
    for number in numbers:
        if number in kept.values():
            # A child process with an open copy would keep the connection open.
            os.set_inheritable(number, False)
        else:
            os.close(number)
    return Inherited(address, kept)


def _encoded(name: str) -> str:
    """Return a name as FDNAME: printable ASCII without colons (sd_notify(3))."""
    encoded = _PREFIX + quote(name, safe="")
    if len(encoded) > _LONGEST_NAME:
        raise ServiceError(f"store descriptor {name}", "its name is too long")
    return encoded


def notify_ready(inherited: Inherited) -> None:
    """Report that this process is ready; does nothing without a notification socket."""
    if inherited.address is not None:
        send(inherited.address, "READY=1")


def store_descriptor(address: str, name: str, descriptor: int) -> None:
    """Store a descriptor in systemd beyond the life of this process; raises ServiceError."""
    send(address, f"FDSTORE=1\nFDPOLL=0\nFDNAME={_encoded(name)}", [descriptor])
    # systemd answers "BARRIER=1" after it has processed all earlier messages (sd_notify(3)). Then the descriptor is
    # stored, and this process may exit.
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send(address, "BARRIER=1", [theirs.fileno()])
        ours.settimeout(ANSWER_SECONDS)
        try:
            # systemd answers by closing its end of the socket pair. Then recv() returns.
            ours.recv(1)
        except OSError as error:
            raise ServiceError("notify systemd", f"it does not answer: {error}") from error


def remove_descriptor(address: str, name: str) -> None:
    """Close the descriptor that systemd stores under a name; raises ServiceError."""
    send(address, f"FDSTOREREMOVE=1\nFDNAME={_encoded(name)}")


def send(address: str, text: str, descriptors: Sequence[int] = ()) -> None:
    """Send one notification; raises ServiceError if systemd does not listen."""
    path = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(path)
            socket.send_fds(connection, [text.encode()], list(descriptors))
    except OSError as error:
        raise ServiceError("notify systemd", f"its socket does not accept the message: {error}") from error
