# SPDX-License-Identifier: Apache-2.0
"""Options of the OpenStack cloud: [amp_openstack], [amp_network_neutron] and [amp_compute_nova].

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
            "Path of an octavia.conf. The account is read from its groups [neutron], [nova], [glance] and "
            "[service_auth] instead of this group. The default is none: the account is in this group, with the "
            "options of keystoneauth."
        ),
        cfg.StrOpt("region_name"): ("Region of the services. The default is the first one of the catalogue."),
        cfg.StrOpt("interface", choices=["public", "internal", "admin"]): (
            "Interface of the services' endpoints. The default is public."
        ),
        cfg.StrOpt("network_endpoint_override"): "Address of Neutron. The default is the endpoint in the catalogue.",
        cfg.StrOpt("compute_endpoint_override"): "Address of Nova. The default is the endpoint in the catalogue.",
        cfg.StrOpt("image_endpoint_override"): "Address of Glance. The default is the endpoint in the catalogue.",
        cfg.StrOpt("load_balancer_endpoint_override"): (
            "Address of Octavia's API, which only `amphoractl status check` uses. The default is the endpoint in the "
            "catalogue."
        ),
    },
    "amp_compute_nova": {
        cfg.ListOpt("management_networks", default=[]): (
            "Ids of the management networks, separated by commas. The backend nova requires this option. Each amphora "
            "has a port on each network. The controllers reach its agent on the first one. There is no default."
        ),
        cfg.StrOpt("image_owner"): (
            "Id of the project that owns the images of amphorae. The backend nova requires this option, because a tag "
            "alone does not prove the origin of an image. There is no default."
        ),
        cfg.StrOpt("image_tag", default="amphora"): (
            "Tag of the image for load balancers whose flavor does not name one. The newest active image of the owner "
            "with this tag is used."
        ),
        cfg.StrOpt("flavor"): (
            "Id or name of the Nova flavor for load balancers whose flavor does not name one. Without this option, "
            "only load balancers whose flavor has a compute_flavor boot. There is no default."
        ),
        cfg.ListOpt("zones", default=[]): (
            "Availability zones for load balancers whose availability zone does not name one, separated by commas. "
            "The amphorae of a pair get different zones. The default is the choice of Nova."
        ),
        cfg.StrOpt("key_name"): (
            "Name of the key pair of the service account for logins with ssh, if the image permits them. The default "
            "is none."
        ),
        cfg.BoolOpt("server_groups", default=False): (
            "Make a server group with anti-affinity for each load balancer. Without it, the backend uses the "
            "scheduler hint different_host. The quota of the project must allow one server group for each load "
            "balancer."
        ),
        cfg.IntOpt("boot_volume_size", default=0, min=0, max=10000): (
            "Number of GiB of the boot volume in Cinder, which Nova deletes with the server. 0 to 10000; 0 means a "
            "disk of the hypervisor."
        ),
        cfg.StrOpt("boot_volume_type"): "Type of the boot volume. The default is that of Cinder.",
        cfg.StrOpt("name_prefix", default="octavia-amphora", regex="^[A-Za-z0-9][A-Za-z0-9-]{0,25}$"): (
            "First part of the names of servers, before the id of the amphora. 1 to 26 letters, digits or '-'."
        ),
        cfg.FloatOpt("request_timeout", default=60.0, min=0.1, max=600.0): (
            "Time limit in seconds for a connection to Nova, Glance or Keystone, and for each part of the answer. "
            "0.1 to 600."
        ),
        cfg.FloatOpt("deletion_timeout", default=15.0, min=0.0, max=600.0): (
            "Seconds for which a job waits until Nova has removed a server or an interface. After this time a later "
            "job continues. 0 to 600."
        ),
        cfg.FloatOpt("listing_interval", default=600.0, min=0.0, max=86400.0): (
            "Seconds between two lists of all servers, for the cleanup of orphans. 0 to 86400."
        ),
        cfg.FloatOpt("cache_time", default=60.0, min=0.0, max=3600.0): (
            "Seconds for which flavors, zones and images are kept after they were read. 0 to 3600."
        ),
        cfg.IntOpt("page_size", default=1000, min=1, max=10000): (
            "Number of objects in one answer of a list. Nova may send fewer. 1 to 10000."
        ),
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
            "Number of objects in one answer of a list. Neutron may send fewer. 1 to 10000."
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
            "First part of the names of the deployment's security groups. 1 to 64 letters, digits, '.', '_' or '-'. "
            "Do not change it while load balancers exist: the group NAME-vips is the evidence of their VIP ports."
        ),
    },
}
