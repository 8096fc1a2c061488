# SPDX-License-Identifier: Apache-2.0
"""What applies where an object says nothing.

Invariant: an object's own value goes before its load balancer's profile, and that before the defaults. Zero
milliseconds are no value: Octavia takes them for "the default", and so do we.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from amphora_driver.model.loadbalancer import Profile

LOG_FORMAT = (
    "{{ project_id }} {{ lb_id }} %f %ci %cp %t %{+Q}r %ST %B %U %[ssl_c_verify] %{+Q}[ssl_c_s_dn] %b %s %Tt %tsc"
)
"""Octavia's documented tenant flow log."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """What the operator configured for all load balancers; as it stands here, Octavia's own defaults.

    Milliseconds. `timeout_tunnel` None: an hour where HTTP is spoken (upgraded connections), the listener's own
    timeouts elsewhere. `connection_limit` None: as many as the machine takes.
    """

    timeout_client_data: int = 50_000
    timeout_member_connect: int = 5_000
    timeout_member_data: int = 50_000
    timeout_tunnel: int | None = None
    timeout_http_request: int = 10_000
    connection_limit: int | None = None
    tls_minimum_version: str | None = None
    tls_ciphers: str | None = None
    connection_logging: bool = False
    log_format: str = LOG_FORMAT


DEFAULTS = Defaults()


@lru_cache(maxsize=256)
def settings(profile: Profile, defaults: Defaults) -> Defaults:
    """The defaults of one load balancer: its profile's values where it has them."""
    chosen = {name: getattr(profile, name) for name in Defaults.__struct_fields__}
    logging = chosen.pop("connection_logging")
    named = {name: value for name, value in chosen.items() if value}
    if logging is not None:
        named["connection_logging"] = logging
    return msgspec.structs.replace(defaults, **named)
