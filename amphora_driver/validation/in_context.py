# SPDX-License-Identifier: Apache-2.0
"""Validation of an object in its load balancer.

Invariant: a new object, and every object at a change of the profile, pass the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from oslo_config.cfg import ConfigOpts

from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Node, Pool
from amphora_driver.validation import options, tls, udp


class ContextCheck:
    """Refuses options that contradict the profile, the backends or the VIPs of the load balancer.

    Args:
        conf: the options of the deployment.
        supports: returns the capabilities of a network backend, by its name.
    """

    def __init__(self, conf: ConfigOpts, supports: Callable[[str], Collection[str]]) -> None:
        self._conf = conf
        self._supports = supports

    def __call__(self, node: Node, balancer: LoadBalancer) -> None:
        """Check one object; raise UnsupportedOption with the option and the reason."""
        ours, chosen = self._conf.amp_haproxy, balancer.profile
        oldest, ciphers = chosen.tls_minimum_version or ours.tls_minimum_version, chosen.tls_ciphers
        if isinstance(node, Listener) and tls.terminates(node):
            tls.listener_negotiation(node, oldest, ciphers or ours.tls_ciphers)
        elif isinstance(node, Listener) and node.uses_l4 and (pool := balancer.pool(node.default_pool_id)) is not None:
            udp.check_address_families(pool, balancer.vips)
        elif isinstance(node, Pool) and node.tls_enabled:
            tls.pool_negotiation(node, oldest, ciphers or ours.tls_ciphers)
        elif isinstance(node, Pool) and node.uses_l4:
            udp.check_l4_algorithm(node)
            if balancer.is_default_pool(node):
                udp.check_address_families(node, balancer.vips)
        elif isinstance(node, LoadBalancer) and (node.vip_qos_policy_id or node.vip_sg_ids):
            name = chosen.network or str(self._conf.amp_network.driver)
            options.check_vip_options(node, name, self._supports(name))
