# SPDX-License-Identifier: Apache-2.0
"""Options of the OpenStack cloud: groups [amp_openstack] and [amp_network_neutron].

The options of keystoneauth for account and TLS (auth_type, auth_url, username, cafile, ...) are valid in
[amp_openstack] too. Keystoneauth registers them when a backend connects.
"""

from __future__ import annotations

from oslo_config import cfg

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_openstack": {
        cfg.StrOpt("deployment_id", regex="^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$"): (
            "Name of this deployment in OpenStack, required by the backends of OpenStack. All its objects carry "
            "it, and the backends change no other object. All processes of a deployment have the same value; no other "
            "deployment of the cloud has it. It must not change while objects exist. There is no default. 1 to 40 "
            "letters, digits, '.', '_' or '-'."
        ),
        cfg.StrOpt("octavia_config"): (
            "Path of an octavia.conf. The account is read from its groups [neutron] and [service_auth] instead of "
            "this group. The default is none: the account is in this group, with the options of keystoneauth."
        ),
        cfg.StrOpt("region_name"): ("Region of the services. The default is the first one of the catalogue."),
        cfg.StrOpt("interface", choices=["public", "internal", "admin"]): (
            "Interface of the services' endpoints. The default is public."
        ),
        cfg.StrOpt("network_endpoint_override"): "Address of Neutron. The default is the endpoint in the catalogue.",
    },
    "amp_network_neutron": {
        cfg.FloatOpt("request_timeout", default=30.0, min=0.1, max=600.0): (
            "Time limit in seconds for a connection to Neutron or Keystone, and for each part of the answer. "
            "0.1 to 600."
        ),
        cfg.FloatOpt("allocation_timeout", default=10.0, min=0.1, max=300.0): (
            "Time limit in seconds for the VIP port within a user's request. After this time the controller "
            "allocates the port, and Octavia never shows its address. 0.1 to 300."
        ),
        cfg.FloatOpt("listing_interval", default=600.0, min=0.0, max=86400.0): (
            "Seconds between two lists of all ports and security groups, for the cleanup of orphans. 0 to 86400."
        ),
        cfg.IntOpt("page_size", default=500, min=1, max=10000): (
            "Number of objects in one answer of a list. 1 to 10000."
        ),
        cfg.FloatOpt("cache_time", default=60.0, min=0.0, max=3600.0): (
            "Seconds for which networks, subnets and security groups are kept after they were read. 0 to 3600."
        ),
        cfg.BoolOpt("listener_rules", default=False): (
            "Make one security group for each load balancer, with a rule for each listener and permitted client "
            "network. Without it, all load balancers share one security group that passes all traffic, and the "
            "firewall of the amphora alone enforces ports and client networks."
        ),
        cfg.ListOpt("management_security_groups", default=[]): (
            "Ids of the security groups of management ports, separated by commas. They must pass the port of the "
            "agent ([amp_agent] port). The default is a security group of the deployment that passes it and ICMP."
        ),
        cfg.StrOpt("security_group_name", default="octavia-amphora", regex="^[A-Za-z0-9._-]{1,64}$"): (
            "First part of the names of the deployment's security groups. 1 to 64 letters, digits, '.', '_' or '-'."
        ),
    },
}
