# SPDX-License-Identifier: Apache-2.0
"""Signed requests: HMAC-SHA256 with a timestamp and a nonce. Pure.

A signed request does not contain the token, so that nothing on its way can use it again. The key is the SHA-256 of the
token. The signature covers method, path (from /v1 on), query, timestamp, nonce, idempotency key and body.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping

import msgspec

from amphora_driver.secret import Secret

TOKEN_HEADER = "X-Cluster-Token-Id"  # noqa: S105 - the name of a header
TIMESTAMP_HEADER = "X-Cluster-Timestamp"
NONCE_HEADER = "X-Cluster-Nonce"
SIGNATURE_HEADER = "X-Cluster-Signature"
# Maximum difference in seconds between the timestamp of a signed request and the clock of the API.
WINDOW_SECONDS = 300.0
_NONCE = re.compile(r"[A-Za-z0-9_-]{16,128}", re.ASCII)
_TIMESTAMP = re.compile(r"\d{1,12}", re.ASCII)
_SIGNATURE = re.compile(r"[0-9a-f]{64}", re.ASCII)


class SignedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The content that a signature covers.

    Args:
        path: the path from /v1 on.
        query: the query as sent, without the question mark.
        timestamp: whole seconds since 1970.
        nonce: 16 to 128 letters, digits, `_` or `-`; a new one for each request.
    """

    method: str
    path: str
    query: str
    timestamp: int
    nonce: str
    idempotency_key: str
    body: bytes

    def signature(self, key: Secret) -> str:
        """Return the signature in hexadecimal digits.

        Args:
            key: the SHA-256 of the token.
        """
        body = hashlib.sha256(self.body).hexdigest()
        head = self.method, self.path, self.query, str(self.timestamp), self.nonce, self.idempotency_key, body
        return hmac.new(key.reveal(), "\n".join(head).encode(), hashlib.sha256).hexdigest()

    def verify(self, key: Secret, signature: str) -> bool:
        """Return whether a signature is valid, in constant time."""
        return hmac.compare_digest(self.signature(key).encode(), signature.encode())

    def headers(self, token_id: str, key: Secret) -> dict[str, str]:
        """Return the headers that a client sends."""
        return {
            TOKEN_HEADER: token_id,
            TIMESTAMP_HEADER: str(self.timestamp),
            NONCE_HEADER: self.nonce,
            SIGNATURE_HEADER: self.signature(key),
            **({"Idempotency-Key": self.idempotency_key} if self.idempotency_key else {}),
        }


def read_signed(
    method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
) -> tuple[str, SignedRequest, str] | None:
    """Return the id of the token, the signed content and the signature of a request.

    The result is None if a header is missing or invalid.

    Args:
        headers: with names in lower case.
    """
    names = (TOKEN_HEADER, TIMESTAMP_HEADER, NONCE_HEADER, SIGNATURE_HEADER)
    token, timestamp, nonce, signature = (headers.get(one.lower(), "") for one in names)
    if not (_TIMESTAMP.fullmatch(timestamp) and _NONCE.fullmatch(nonce) and _SIGNATURE.fullmatch(signature)):
        return None
    signed = SignedRequest(
        method=method,
        path=path,
        query=query,
        timestamp=int(timestamp),
        nonce=nonce,
        idempotency_key=headers.get("idempotency-key", ""),
        body=body,
    )
    return token, signed, signature
