# SPDX-License-Identifier: Apache-2.0
"""Validation of the request headers that a listener inserts.

Invariant: this module contains exactly the names that the API accepts (`octavia_lib.common.constants`).
"""

from __future__ import annotations

from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.validation.unsupported import refuse

FORWARDED_FOR = "X-Forwarded-For"
"""Only this header keeps the client's value, because it is a list of hops."""

_CONNECTION = "X-Forwarded-Port", "X-Forwarded-Proto", "X-Forwarded-IP", "X-Client-IP", "X-Real-IP"
ABOUT_CONNECTION = (FORWARDED_FOR, *_CONNECTION)
_NAMES = ("X-SSL-Client-Verify", "X-SSL-Client-Has-Cert", "X-SSL-Client-DN", "X-SSL-Client-CN", "X-SSL-Issuer")
_FACTS = ("X-SSL-Client-SHA1", "X-SSL-Client-Not-Before", "X-SSL-Client-Not-After")
ABOUT_CERTIFICATE = (*_NAMES, *_FACTS)

_OPTION = "listener option insert_headers"


def check_inserted_headers(listener: Listener) -> None:
    """Refuse headers that the listener cannot insert."""
    for name in listener.insert_headers or ():
        if name not in ABOUT_CONNECTION and name not in ABOUT_CERTIFICATE:
            known = ", ".join(ABOUT_CONNECTION + ABOUT_CERTIFICATE)
            refuse(_OPTION, name, "this header is unknown", f"Use one of {known}.")
        if listener.protocol not in (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS):
            refuse(_OPTION, name, f"a {listener.protocol} listener does not process HTTP", "Remove the header.")
        if name in ABOUT_CERTIFICATE and listener.protocol is not ListenerProtocol.TERMINATED_HTTPS:
            reason = "only a TERMINATED_HTTPS listener receives certificates of clients"
            refuse(_OPTION, name, reason, "Remove the header.")
