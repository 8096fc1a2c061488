# SPDX-License-Identifier: Apache-2.0
"""PUT /v2/certificate: a new certificate for this agent.

Invariant: the agent answers after a TLS handshake has shown the new certificate. No answer and no log quotes the
request.
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
from amphora_agent.tls_identity import Identity, shown_by

LARGEST = 1 << 20
_OPTIONAL = ("client_ca", "server_ca")
_ACTION = "install a new certificate"


def blueprint(settings: Settings, identity: Identity) -> Blueprint:
    """Return the route."""
    routes = Blueprint("certificate", __name__)

    @routes.put("/v2/certificate")
    def put_certificate() -> ResponseReturnValue:
        document = _read(request.get_data())
        found = identity.replace(
            document["certificate"],
            client_ca=document.get("client_ca"),
            server_ca=document.get("server_ca"),
            caller=request.environ["gunicorn.socket"].getpeercert()["issuer"],
            prove=_prover(settings),
        )
        return {"expires_at": found.expires_at, "fingerprint": found.fingerprint}

    return routes


def certificate_setter(settings: Settings, identity: Identity) -> Callable[[bytes], None]:
    """Return a function that installs a certificate with its key, as Octavia's API sends them."""

    def install(body: bytes) -> None:
        try:
            pem = body.decode("ascii")
        except UnicodeDecodeError:
            raise MalformedCertificate(_ACTION, "the body is not PEM") from None
        identity.replace(pem, client_ca=None, server_ca=None, caller=(), prove=_prover(settings))

    return install


def _prover(settings: Settings) -> Callable[[str], str]:
    return partial(shown_by, settings.bind_address, settings.bind_port, str(settings.amphora_id))


def _read(body: bytes) -> dict[str, Any]:
    if len(body) > LARGEST:
        raise MalformedCertificate(_ACTION, f"the request is longer than {LARGEST} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        # `from None` drops the parser's error, which would quote the request, perhaps with a private key.
        raise MalformedCertificate(_ACTION, "the request is not JSON") from None
    if not isinstance(document, dict) or not isinstance(document.get("certificate"), str):
        raise MalformedCertificate(_ACTION, "the request has no string 'certificate'")
    unknown = document.keys() - {"certificate", *_OPTIONAL}
    if unknown:
        raise MalformedCertificate(_ACTION, f"the request has {len(unknown)} unknown keys")
    if any(not isinstance(document.get(name), str | None) for name in _OPTIONAL):
        raise MalformedCertificate(_ACTION, "a CA certificate is neither a string nor null")
    return document
