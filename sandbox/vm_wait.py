# SPDX-License-Identifier: Apache-2.0
"""Virtual machines that were powered on again, until their agents answer.

Invariant: whoever looks for amphorae that are silent is started after they could have spoken; a machine that boots is
not one that is dead. One that never answers is left to him.
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

# Seconds between two looks, between two words, and for one answer.
_POLL_INTERVAL, _NOTE_INTERVAL, _HANDSHAKE_TIMEOUT = 1.0, 30.0, 10.0


def wait_for_agents(settings: Settings, addresses: Mapping[str, str], port: int, note: Callable[[str], None]) -> None:
    """Wait until each of them has answered, or for as long as anything may take here.

    Args:
        addresses: on the management network, by amphora.
        port: of their agents.
        note: told now and then who is waited for.
    """
    began = said = time.monotonic()
    left = dict(addresses)
    while True:
        for amphora_id, address in addresses.items():
            if amphora_id in left and _accepts_tls(settings, amphora_id, (address, port)):
                del left[amphora_id]
        now = time.monotonic()
        if not left or now > began + settings.wait_timeout:
            return
        if now - said > _NOTE_INTERVAL:
            said = now
            note(f"still waiting: {len(left)} of {len(addresses)} amphorae boot ({now - began:.0f} s)")
        time.sleep(_POLL_INTERVAL)


def _accepts_tls(settings: Settings, amphora_id: str, place: tuple[str, int]) -> bool:
    """Whether it speaks TLS. One that does not trust us, or we it, does."""
    context = ssl.create_default_context(cafile=settings.etc / "amphora_ca.pem")
    context.load_cert_chain(settings.etc / "controller.pem")

    def greet() -> bool:
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

    return namespaces.run_inside(namespaces.path(settings.control), greet)
