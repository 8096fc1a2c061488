# SPDX-License-Identifier: Apache-2.0
"""Options of the connections to the cloud: [amp_cluster_cloud].

Invariant: the addresses of the cloud come from the operator only. A user gives an application credential, and cannot
make the service connect to another host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from oslo_config import cfg

from amphora_driver.errors import ConfigurationError

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

GROUP = "amp_cluster_cloud"
SERVICES = ("octavia", "nova", "heat")

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    GROUP: {
        cfg.StrOpt("auth_url"): (
            "URL of Keystone, for example https://cloud.example/identity/v3. Required, except with without_keystone. "
            "There is no default."
        ),
        cfg.StrOpt("region_name"): "Region of the services. The default is the first one of the catalogue.",
        cfg.StrOpt("interface", default="public", choices=["public", "internal"]): (
            "Interface of the services' endpoints."
        ),
        cfg.StrOpt("cafile"): (
            "Path of the certificates that verify Keystone and the services. The default is the list of the system."
        ),
        cfg.StrOpt("octavia_endpoint_override"): "URL of Octavia. The default is the endpoint in the catalogue.",
        cfg.StrOpt("nova_endpoint_override"): "URL of Nova. The default is the endpoint in the catalogue.",
        cfg.StrOpt("heat_endpoint_override"): "URL of Heat. The default is the endpoint in the catalogue.",
        cfg.FloatOpt("request_timeout", default=20.0, min=0.1, max=600.0): (
            "Time limit in seconds for a connection, and for each part of an answer. 0.1 to 600."
        ),
        cfg.IntOpt("page_size", default=1000, min=1, max=10000): (
            "Number of objects in one answer of a list. The services may have a smaller limit. 1 to 10000."
        ),
        cfg.FloatOpt("server_list_age", default=1.0, min=0.0, max=60.0): (
            "Seconds for which the groups of one owner share a list of all servers of the project. 0 to 60."
        ),
        cfg.BoolOpt("without_keystone", default=False): (
            "Send no token, but the project of the group in a header. For test clouds without Keystone on one machine "
            "only: the services then trust each client, and each group can name each project. The three "
            "endpoint_override options are required with it."
        ),
    }
}


class CloudSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the services. The fields have the meaning of the options."""

    auth_url: str | None = None
    region_name: str | None = None
    interface: str = "public"
    cafile: str | None = None
    endpoints: dict[str, str] = {}
    request_timeout: float = 20.0
    page_size: int = 1000
    server_list_age: float = 1.0
    without_keystone: bool = False


def settings(conf: ConfigOpts) -> CloudSettings:
    """Return the settings of the connections.

    Raises:
        ConfigurationError: a required option is missing.
    """
    own = conf[GROUP]
    endpoints = {one: own[f"{one}_endpoint_override"] for one in SERVICES if own[f"{one}_endpoint_override"]}
    if own.without_keystone:
        missing = [one for one in ("octavia", "nova") if one not in endpoints]
        if missing:
            names = ", ".join(f"{one}_endpoint_override" for one in missing)
            raise ConfigurationError("connect to the cloud", f"[{GROUP}] {names} is not set", f"Set {names}.")
    elif not own.auth_url:
        raise ConfigurationError("connect to the cloud", f"[{GROUP}] auth_url is not set", "Set it to Keystone's URL.")
    return CloudSettings(
        auth_url=own.auth_url,
        region_name=own.region_name,
        interface=own.interface,
        cafile=own.cafile,
        endpoints=endpoints,
        request_timeout=own.request_timeout,
        page_size=own.page_size,
        server_list_age=own.server_list_age,
        without_keystone=own.without_keystone,
    )
