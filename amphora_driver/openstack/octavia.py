# SPDX-License-Identifier: Apache-2.0
"""The list of providers of Octavia's API.

Invariant: the module reads only. octavia-api removes a provider from the list if the driver cannot be loaded at the
start of octavia-api. Users then cannot create load balancers of this provider, and only a log line has the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amphora_driver.errors import NetworkError
from amphora_driver.openstack.errors import ApiError, translate
from amphora_driver.openstack.session import Service

if TYPE_CHECKING:
    from oslo_config.cfg import ConfigOpts

_WANTED = "list the providers of Octavia"


def list_providers(conf: ConfigOpts, timeout: float) -> tuple[str, ...]:
    """Return the names of the providers that the answering octavia-api offers.

    Args:
        conf: our options, with the account in [amp_openstack].
        timeout: seconds that a request waits for a connection, and for each part of the answer.

    Raises:
        AmphoraDriverError: Octavia or Keystone does not answer, or refuses the account.
    """
    service = Service(conf, "load_balancer", "service_auth", timeout)
    try:
        answer = service.request("GET", "/lbaas/providers")
        return tuple(str(one["name"]) for one in answer["providers"])
    except ApiError as error:
        if error.status == 403:
            remedy = "Give the service account the role load-balancer_observer."
            raise NetworkError(_WANTED, f"the service account lacks a right: {error.message}", remedy) from error
        raise translate(error, _WANTED) from error
    except (KeyError, TypeError) as error:
        remedy = "Check [amp_openstack] load_balancer_endpoint_override."
        raise NetworkError(_WANTED, "the answer has no list of providers", remedy) from error
