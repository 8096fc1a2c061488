# SPDX-License-Identifier: Apache-2.0
"""Wait for the agents of virtual machines after they are powered on.

Invariant: failure detection starts after the machines have booted, so that it does not take a booting machine for a
dead one. The wait has a time-out: failure detection handles a machine that never answers.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from amphora_driver.host import namespaces

if TYPE_CHECKING:
    from sandbox.settings import Settings

# Seconds between two polls, between two progress messages, and for a TLS handshake.
_POLL_INTERVAL, _NOTE_INTERVAL, _HANDSHAKE_TIMEOUT = 1.0, 30.0, 10.0


def wait_for_agents(settings: Settings, addresses: Mapping[str, str], port: int, note: Callable[[str], None]) -> None:
    """Wait until each agent has answered, or until the time-out of the sandbox.

    Args:
        settings: the sandbox.
        addresses: management addresses by amphora id.
        port: the port of the agents.
        note: receives progress messages.
    """
    started = noted = time.monotonic()
    left = dict(addresses)
    while True:
        for amphora_id, address in addresses.items():
            if amphora_id in left and _accepts_tls(settings, amphora_id, (address, port)):
                del left[amphora_id]
        now = time.monotonic()
        if not left or now > started + settings.wait_timeout:
            return
        if now - noted > _NOTE_INTERVAL:
            noted = now
            note(f"still waiting: {len(left)} of {len(addresses)} amphorae boot ({now - started:.0f} s)")
        time.sleep(_POLL_INTERVAL)


def _accepts_tls(settings: Settings, amphora_id: str, place: tuple[str, int]) -> bool:
    """Whether the agent answers with TLS, even if a certificate is refused."""
    context = ssl.create_default_context(cafile=settings.etc / "amphora_ca.pem")
    context.load_cert_chain(settings.etc / "controller.pem")

    def handshake() -> bool:
        try:
            with (
                socket.create_connection(place, timeout=_HANDSHAKE_TIMEOUT) as connection,
                context.wrap_socket(connection, server_hostname=amphora_id),
            ):
                return True
        except ssl.SSLError as error:
            return not isinstance(error, ssl.SSLEOFError)
        except OSError:
            return False

    return namespaces.run_inside(namespaces.path(settings.control), handshake)
