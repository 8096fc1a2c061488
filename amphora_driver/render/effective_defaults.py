# SPDX-License-Identifier: Apache-2.0
"""The defaults of a load balancer: its profile and the options of the operator.

Invariant: the value of an object has priority over the profile of its load balancer, and the profile over the defaults.
Zero milliseconds mean "the default", as in Octavia. Limits of the profile apply to each time-out of data, whatever its
origin: some clients of Octavia always send the same time-outs, so a default of the profile has no effect for them.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from amphora_driver.model.loadbalancer import Profile

LOG_FORMAT = (
    "{{ project_id }} {{ lb_id }} %f %ci %cp %t %{+Q}r %ST %B %U %[ssl_c_verify] %{+Q}[ssl_c_s_dn] %b %s %Tt %tsc"
)
"""The format of Octavia's tenant flow log."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The operator's defaults for all load balancers. Times are in milliseconds.

    Without `timeout_tunnel`, upgraded HTTP connections have an hour and tunnels the time-outs of the listener.
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


class TimeoutRange(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Limits of one time-out in milliseconds, both inclusive; None is no limit."""

    minimum: int | None = None
    maximum: int | None = None

    def limit(self, milliseconds: int) -> int:
        """Return the permitted value that is nearest to a time-out."""
        raised = milliseconds if self.minimum is None else max(milliseconds, self.minimum)
        return raised if self.maximum is None else min(raised, self.maximum)


class TimeoutLimits(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The limits that a profile sets for the time-outs of listeners."""

    client_data: TimeoutRange = TimeoutRange()
    member_connect: TimeoutRange = TimeoutRange()
    member_data: TimeoutRange = TimeoutRange()


@lru_cache(maxsize=256)
def timeout_limits(profile: Profile) -> TimeoutLimits:
    """Return the limits that a profile sets for the time-outs of listeners."""
    return TimeoutLimits(
        client_data=TimeoutRange(
            minimum=profile.timeout_client_data_minimum, maximum=profile.timeout_client_data_maximum
        ),
        member_connect=TimeoutRange(
            minimum=profile.timeout_member_connect_minimum, maximum=profile.timeout_member_connect_maximum
        ),
        member_data=TimeoutRange(
            minimum=profile.timeout_member_data_minimum, maximum=profile.timeout_member_data_maximum
        ),
    )


@lru_cache(maxsize=256)
def effective_defaults(profile: Profile, defaults: Defaults) -> Defaults:
    """Return the defaults of one load balancer. Each value of its profile replaces a default."""
    chosen = {name: getattr(profile, name) for name in Defaults.__struct_fields__}
    logging = chosen.pop("connection_logging")
    named = {name: value for name, value in chosen.items() if value}
    if logging is not None:
        named["connection_logging"] = logging
    return msgspec.structs.replace(defaults, **named)
