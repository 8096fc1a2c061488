# SPDX-License-Identifier: Apache-2.0
"""Wait for the agents of virtual machines after a power-on, and polling with progress messages.

Invariant: failure detection starts after the machines have booted, so that it does not take a booting machine for a
dead one. The wait has a time-out: failure detection handles a machine that never answers.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from amphora_driver.host import namespaces

if TYPE_CHECKING:
    from sandbox.settings import Settings

# While a machine boots, its agent is polled every _POLL_INTERVAL seconds, and the progress is reported every
# _NOTE_INTERVAL seconds.
_POLL_INTERVAL, _NOTE_INTERVAL, _HANDSHAKE_TIMEOUT = 1.0, 30.0, 10.0


def wait_for_agents(settings: Settings, addresses: Mapping[str, str], port: int, note: Callable[[str], None]) -> None:
    """Wait until each agent has answered, or until the time-out; `addresses` has them by amphora id."""
    left = dict(addresses)

    def note_progress(seconds: float) -> None:
        note(f"still waiting: {len(left)} of {len(addresses)} amphorae boot ({seconds:.0f} s)")

    for _ in poll(settings.wait_timeout, note_progress):
        left = {one: address for one, address in left.items() if not _accepts_tls(settings, one, (address, port))}
        if not left:
            return


def poll(timeout: float, note: Callable[[float], None], interval: float | None = None) -> Iterator[None]:
    """Yield at once and after each interval until the time-out; `note` gets the seconds of a long wait."""
    started = noted = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        if now > started + timeout:
            return
        if now - noted > _NOTE_INTERVAL:
            noted = now
            note(now - started)
        time.sleep(_POLL_INTERVAL if interval is None else interval)


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
