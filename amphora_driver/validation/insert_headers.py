# SPDX-License-Identifier: Apache-2.0
"""Validation of the request headers that a listener inserts.

Invariant: this module contains exactly the names that the API accepts (`octavia_lib.common.constants`).
"""

from __future__ import annotations

from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.validation.unsupported import refuse

FORWARDED_FOR = "X-Forwarded-For"
"""The only header that keeps the client's value: it is a list of hops."""

ABOUT_CONNECTION = (
    FORWARDED_FOR,
    "X-Forwarded-Port",
    "X-Forwarded-Proto",
    "X-Forwarded-IP",
    "X-Client-IP",
    "X-Real-IP",
)
ABOUT_CERTIFICATE = (
    "X-SSL-Client-Verify",
    "X-SSL-Client-Has-Cert",
    "X-SSL-Client-DN",
    "X-SSL-Client-CN",
    "X-SSL-Issuer",
    "X-SSL-Client-SHA1",
    "X-SSL-Client-Not-Before",
    "X-SSL-Client-Not-After",
)

_OPTION = "listener option insert_headers"


def check_inserted_headers(listener: Listener) -> None:
    """Refuse headers that the listener cannot insert.

    Raises:
        UnsupportedOption: the name is unknown, or a listener of this protocol cannot insert the header.
    """
    for name in listener.insert_headers or ():
        if name not in ABOUT_CONNECTION and name not in ABOUT_CERTIFICATE:
            refuse(
                _OPTION,
                name,
                "this header is unknown",
                f"Use one of {', '.join(ABOUT_CONNECTION + ABOUT_CERTIFICATE)}.",
            )
        if listener.protocol not in (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS):
            refuse(_OPTION, name, f"a {listener.protocol} listener does not process HTTP", "Remove the header.")
        if name in ABOUT_CERTIFICATE and listener.protocol is not ListenerProtocol.TERMINATED_HTTPS:
            refuse(
                _OPTION, name, "only a TERMINATED_HTTPS listener receives certificates of clients", "Remove the header."
            )
