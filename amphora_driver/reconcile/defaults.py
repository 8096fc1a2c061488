# SPDX-License-Identifier: Apache-2.0
"""What the configuration says where a load balancer's profile says nothing.

Invariant: asked anew for every push, so that a changed option reaches every load balancer with its next change, and
what a profile says stays as it was chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from amphora_driver.errors import ConfigurationError, UnsupportedOption
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.validation import flavors, log_format

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.model.loadbalancer import LoadBalancer


def check(conf: ConfigOpts) -> None:
    """Refuse what would be refused in a flavor: it would be wrong in every load balancer.

    Raises:
        ConfigurationError: naming the option.
    """
    said = {name: value for name, value in dict(conf.haproxy).items() if value is not None}
    try:
        flavors.SCHEMA.validate(said, {})
        log_format.check_log_format(said.get("log_format", ""))
    except UnsupportedOption as error:
        raise ConfigurationError("use the options of [haproxy]", str(error).rstrip(".")) from error


def defaults(conf: ConfigOpts) -> Defaults:
    """The defaults of `[haproxy]`; an option that is not set leaves what rendering takes for the default."""
    said = {name: conf.haproxy[name] for name in Defaults.__struct_fields__}
    return Defaults(**{name: value for name, value in said.items() if value is not None})


def advert_interval(tree: LoadBalancer, conf: ConfigOpts) -> float:
    """Seconds between two advertisements of the amphora that has the VIPs."""
    return float(tree.profile.vrrp_advert_interval or conf.vrrp.advert_interval)


def limited(tree: LoadBalancer, conf: ConfigOpts) -> LoadBalancer:
    """The load balancer with the limits of its HAProxy processes filled in."""
    profile = msgspec.structs.replace(
        tree.profile,
        process_connection_limit=tree.profile.process_connection_limit or conf.haproxy.process_connection_limit,
        process_threads=tree.profile.process_threads or conf.haproxy.process_threads,
    )
    return msgspec.structs.replace(tree, profile=profile)
