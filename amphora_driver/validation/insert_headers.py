# SPDX-License-Identifier: Apache-2.0
"""Request headers that a listener can insert.

Invariant: every name that the API accepts (`octavia_lib.common.constants`) is here, and nothing else.
"""

from __future__ import annotations

from amphora_driver.model.enums import ListenerProtocol
from amphora_driver.model.loadbalancer import Listener
from amphora_driver.validation.unsupported import refuse

FORWARDED_FOR = "X-Forwarded-For"
"""The one header that is added to what the client sent: it is a list of hops."""

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


def check(listener: Listener) -> None:
    """Refuse a header that cannot be inserted.

    Raises:
        UnsupportedOption: there is no such header, or not on a listener of this protocol.
    """
    for name in listener.insert_headers or ():
        if name not in ABOUT_CONNECTION and name not in ABOUT_CERTIFICATE:
            refuse(_OPTION, name, "there is no such header", f"Use {', '.join(ABOUT_CONNECTION + ABOUT_CERTIFICATE)}.")
        if listener.protocol not in (ListenerProtocol.HTTP, ListenerProtocol.TERMINATED_HTTPS):
            refuse(_OPTION, name, f"a {listener.protocol} listener does not read HTTP", "Leave it out.")
        if name in ABOUT_CERTIFICATE and listener.protocol is not ListenerProtocol.TERMINATED_HTTPS:
            refuse(_OPTION, name, "only a TERMINATED_HTTPS listener sees certificates of clients", "Leave it out.")
