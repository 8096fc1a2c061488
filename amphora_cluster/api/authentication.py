# SPDX-License-Identifier: Apache-2.0
"""Authentication of webhooks: a token, or a signature with the token's key.

Invariant: a token is valid for one group. All failures have the same answer: an unknown group, an unknown, expired or
forged token, and the token of another group. Digests are compared in constant time. No log line contains a token.
"""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from amphora_cluster.api.signature import SIGNATURE_HEADER, TOKEN_HEADER, WINDOW_SECONDS, read_signed
from amphora_cluster.database.tokens import TokenRecord, token_digest, token_id
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.secret import Secret

LOG = logging.getLogger(__name__)
_ID = re.compile(r"[0-9a-f-]{36}", re.ASCII)
_MOST_TOKEN = 200
_BEARER = "bearer "
# If the id of a token does not exist, the token is compared with this value. So the duration of the answer does not
# reveal which ids exist.
_NOTHING = Secret(bytes(32))
_REMEDY = "Send a valid token of this group: Authorization: Bearer TOKEN."


class Unauthenticated(AmphoraDriverError):
    """A webhook has no valid token of its group."""


class Replayed(AmphoraDriverError):
    """A signed request was received before."""


class Tokens(Protocol):
    """The part of `TokenStore` that authentication uses."""

    def now(self) -> float:
        """Return the database clock, in seconds since 1970."""

    def find(self, wanted: str) -> tuple[TokenRecord, Secret] | None:
        """Return the valid token with this id and its digest."""

    def use_nonce(self, token: str, nonce: str, seconds: float) -> bool:
        """Record a nonce; return False if it was used before."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A request as authentication reads it.

    Args:
        path: the path from /v1 on.
        query: the query as sent.
        tokens: the values of the parameter `token` of the query.
        headers: with names in lower case.
    """

    method: str
    path: str
    query: str
    tokens: Sequence[str]
    headers: Mapping[str, str]
    body: bytes


def credential_of(headers: Mapping[str, str], tokens: Sequence[str], source: str) -> str:
    """Return the text by which `FailedAttempts` recognizes a caller.

    Args:
        headers: with names in lower case.
        tokens: the values of the parameter `token` of the query.
        source: the source address of the request.
    """
    if SIGNATURE_HEADER.lower() in headers:
        return f"{source} {headers.get(TOKEN_HEADER.lower(), '')}"
    return _sent_token(headers, tokens)


def authenticate(received: Received, group_id: str, tokens: Tokens) -> TokenRecord:
    """Return the token of a request for a group.

    Raises:
        Unauthenticated: the request has no valid token of this group.
        Replayed: the signature is valid, but its nonce was used before.
        StoreError: the database does not answer.
    """
    if SIGNATURE_HEADER.lower() in received.headers:
        return _signed(received, group_id, tokens)
    token = Secret(_sent_token(received.headers, received.tokens).encode())
    record, digest = _find(token_id(token.reveal().decode()), tokens)
    same = hmac.compare_digest(token_digest(token).reveal(), digest.reveal())
    if record is None or not same or record.group_id != group_id:
        raise _refusal()
    return record


def _signed(received: Received, group_id: str, tokens: Tokens) -> TokenRecord:
    found = read_signed(received.method, received.path, received.query, received.headers, received.body)
    if found is None:
        raise _refusal()
    wanted, signed, signature = found
    record, key = _find(wanted, tokens)
    valid = signed.verify(key, signature)
    if record is None or not valid or record.group_id != group_id:
        raise _refusal()
    # The timestamp is compared with the database clock, because this clock also limits the lifetime of nonces. With a
    # slow clock of the host, a timestamp could outlive its nonce.
    if abs(tokens.now() - signed.timestamp) > WINDOW_SECONDS:
        happened = f"the timestamp differs by more than {WINDOW_SECONDS:g} s from the clock of this service"
        raise Unauthenticated("authenticate the request", happened, "Set the clock of the client.")
    # The nonce is kept until the timestamp is too old, also if the client's clock is ahead. So no request is accepted
    # twice.
    if not tokens.use_nonce(record.id, signed.nonce, 2 * WINDOW_SECONDS + 1):
        raise Replayed("authenticate the request", "its nonce was used before", "Sign each request with a new nonce.")
    return record


def _find(wanted: str, tokens: Tokens) -> tuple[TokenRecord | None, Secret]:
    found = tokens.find(wanted) if _ID.fullmatch(wanted) else None
    return (None, _NOTHING) if found is None else found


def _sent_token(headers: Mapping[str, str], tokens: Sequence[str]) -> str:
    header = headers.get("authorization", "")
    sent = [header[len(_BEARER) :].strip()] if header.lower().startswith(_BEARER) else []
    sent += tokens
    return sent[0] if len(sent) == 1 and len(sent[0]) <= _MOST_TOKEN else ""


def _refusal() -> Unauthenticated:
    return Unauthenticated("authenticate the request", "the token is not valid for this group", _REMEDY)
