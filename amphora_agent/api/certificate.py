# SPDX-License-Identifier: Apache-2.0
"""PUT /v2/certificate: another certificate for this agent.

Invariant: what came with the request is in no answer and no log; the answer to a PUT is given only after a
handshake has shown the new certificate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from flask import Blueprint, request
from flask.typing import ResponseReturnValue

from amphora_agent.config import Settings
from amphora_agent.errors import MalformedCertificate
from amphora_agent.tls_identity import Identity, Name, shown_by

LARGEST = 1 << 20
_OPTIONAL = ("client_ca", "server_ca")


def blueprint(settings: Settings, identity: Identity) -> Blueprint:
    """The route."""
    routes = Blueprint("certificate", __name__)

    @routes.put("/v2/certificate")
    def put_certificate() -> ResponseReturnValue:
        document = _read(request.get_data())
        found = identity.replace(
            document["certificate"],
            client_ca=document.get("client_ca"),
            server_ca=document.get("server_ca"),
            caller=_issuer(request.environ.get("gunicorn.socket")),
            prove=_prover(settings),
        )
        return {"expires_at": found.expires_at, "fingerprint": found.fingerprint}

    return routes


def taker(settings: Settings, identity: Identity) -> Callable[[bytes], None]:
    """Takes a certificate and its key, as Octavia's API sends them."""

    def take(body: bytes) -> None:
        try:
            pem = body.decode("ascii")
        except UnicodeDecodeError:
            raise MalformedCertificate("take a new certificate", "it is no PEM") from None
        identity.replace(pem, client_ca=None, server_ca=None, caller=(), prove=_prover(settings))

    return take


def _prover(settings: Settings) -> Callable[[str], str]:
    return partial(shown_by, settings.bind_address, settings.bind_port, str(settings.amphora_id))


def _read(body: bytes) -> dict[str, Any]:
    wanted = "take a new certificate"
    if len(body) > LARGEST:
        raise MalformedCertificate(wanted, f"the request is longer than {LARGEST} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        # Not quoted: there may be a key in it.
        raise MalformedCertificate(wanted, "the request is no JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("certificate"), str):
        raise MalformedCertificate(wanted, "there is no text 'certificate' in the request")
    unknown = document.keys() - {"certificate", *_OPTIONAL}
    if unknown:
        raise MalformedCertificate(wanted, f"the request has {len(unknown)} unknown keys")
    if any(not isinstance(document.get(name), str | None) for name in _OPTIONAL):
        raise MalformedCertificate(wanted, "an authority is neither a text nor null")
    return document


def _issuer(connection: Any) -> Name:
    """Who signed the certificate of the caller."""
    found: Name = connection.getpeercert()["issuer"]
    return found
