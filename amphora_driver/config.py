# SPDX-License-Identifier: Apache-2.0
"""Every option an operator can set, in one place.

Invariant: our options live in a `ConfigOpts` of our own, never in the global one: inside octavia-api that one belongs
to Octavia. The file is `$AMPHORA_DRIVER_CONFIG` or, without it, `/etc/amphora-driver/amphora-driver.conf`.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from oslo_config import cfg
from oslo_log import log

from amphora_driver.config_compute import COMPUTE_NETNS, COMPUTE_QEMU
from amphora_driver.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_FILE = "/etc/amphora-driver/amphora-driver.conf"
FILE_VARIABLE = "AMPHORA_DRIVER_CONFIG"

STORE = [
    cfg.StrOpt(
        "connection",
        default="sqlite:////var/lib/amphora-driver/amphora-driver.sqlite",
        secret=True,
        help="SQLAlchemy URL of the database that holds wanted states, jobs and amphorae.",
    ),
    cfg.StrOpt(
        "encryption_key_file",
        default="/etc/amphora-driver/encryption.keys",
        help="File with one Fernet key a line. The first one encrypts, all of them decrypt.",
    ),
]
QUEUE = [
    cfg.StrOpt(
        "engine",
        default="embedded",
        choices=["embedded", "celery"],
        help="How other hosts hear of a job: not at all, so that they look every poll_interval, or by Celery.",
    ),
    cfg.StrOpt(
        "broker_url",
        default="amqp://127.0.0.1:5672//",
        secret=True,
        help="Celery's broker, RabbitMQ: amqp://user:password@host:5672//vhost; several, separated by semicolons, are "
        "tried one after the other. Only with engine = celery.",
    ),
    cfg.StrOpt(
        "doorbell_dir",
        default="/run/amphora-driver",
        help="Directory of the unix sockets through which processes of one host wake each other.",
    ),
    cfg.FloatOpt(
        "poll_interval", default=1.0, min=0.01, help="Seconds between looks at the database when nobody rings."
    ),
]
CONTROLLER = [
    cfg.IntOpt("threads", default=8, min=1, help="Load balancers worked on at once by one controller."),
    cfg.FloatOpt(
        "lease",
        default=15.0,
        min=1.0,
        help="Seconds after which another controller may take over from one that stopped renewing.",
    ),
    cfg.FloatOpt(
        "operation_timeout",
        default=300.0,
        min=1.0,
        help="Seconds one attempt to make a load balancer as recorded may take with all it asks of others. Waiting for "
        "machines that boot is no part of it.",
    ),
    cfg.FloatOpt(
        "boot_timeout",
        default=300.0,
        help="Seconds an amphora may take from boot to its agent's first answer. After that its load balancer is "
        "reported in ERROR, and the amphora is booted anew.",
    ),
    cfg.StrOpt(
        "loadbalancer_topology",
        default="SINGLE",
        choices=["SINGLE", "ACTIVE_STANDBY"],
        help="Topology of new load balancers whose flavor names none. Those that exist keep theirs.",
    ),
    cfg.FloatOpt(
        "drain_timeout",
        default=300.0,
        min=0.0,
        max=86_000.0,
        help="Seconds for which open connections may go on by way of the new amphora when an amphora of a pair is "
        "replaced on request. It is removed as soon as the last of them has ended. 0 cuts them at once.",
    ),
    cfg.FloatOpt("retry_first", default=0.5, help="Seconds before the first retry of a failed job; doubles each time."),
    cfg.FloatOpt("retry_most", default=60.0, help="Longest pause between retries, in seconds."),
    cfg.FloatOpt(
        "forget_vip_after",
        default=600.0,
        min=0.0,
        help="Seconds after which the addresses of a load balancer whose creation never came are released.",
    ),
    cfg.FloatOpt(
        "orphan_grace",
        default=900.0,
        min=0.0,
        help="Seconds for which a machine, port or VIP of which nothing is recorded may still turn out to be "
        "somebody's. It is removed after that.",
    ),
    cfg.FloatOpt(
        "housekeeping_interval",
        default=30.0,
        min=0.1,
        help="Seconds between two looks at what nobody else would ever clean up.",
    ),
    cfg.IntOpt(
        "give_up_after",
        default=8,
        min=1,
        help="Attempts that failed, or killed a controller, until the load balancer is in ERROR; retries go on.",
    ),
]
AGENT = [
    cfg.PortOpt("port", default=9443, help="Port of the agents' interface."),
    cfg.FloatOpt("connect_timeout", default=3.0, help="Seconds to wait for a TCP and TLS connection to an agent."),
    cfg.FloatOpt(
        "request_timeout",
        default=60.0,
        help="Seconds to wait for an agent's answer; up to five times as long where a load balancer is large.",
    ),
    cfg.StrOpt(
        "services",
        default="systemd",
        choices=["systemd", "supervisor"],
        help="What runs daemons inside an amphora: systemd in a VM, the supervisor in a namespace.",
    ),
]
OCTAVIA = [
    cfg.StrOpt("status_socket", default="/var/run/octavia/status.sock", help="octavia-driver-agent's status socket."),
    cfg.StrOpt("stats_socket", default="/var/run/octavia/stats.sock", help="octavia-driver-agent's statistics socket."),
    cfg.StrOpt("get_socket", default="/var/run/octavia/get.sock", help="octavia-driver-agent's read socket."),
    cfg.FloatOpt(
        "commit_patience",
        default=30.0,
        min=0.1,
        help="Seconds after which a load balancer is removed again that Octavia handed over and does not know: its "
        "transaction has ended, and was rolled back.",
    ),
    cfg.FloatOpt(
        "audit_after",
        default=5.0,
        min=0.0,
        help="Seconds after a change at which a load balancer is compared with what Octavia has kept of it: it may "
        "have failed after our answer.",
    ),
    cfg.FloatOpt(
        "audit_interval",
        default=5.0,
        min=0.0,
        help="Seconds between two such comparisons at the least, whatever was changed.",
    ),
]
HEALTH = [
    cfg.StrOpt("bind_address", default="0.0.0.0", help="Address on which heartbeats are received."),
    cfg.PortOpt("bind_port", default=5555, help="UDP port on which heartbeats are received."),
    cfg.ListOpt("targets", default=[], help="address:port of every health manager; amphorae report to all of them."),
    cfg.FloatOpt("interval", default=3.0, min=0.1, help="Seconds between an amphora's heartbeats."),
    cfg.FloatOpt(
        "flush_interval",
        default=0.5,
        min=0.05,
        help="Seconds for which changes are collected before they are written down together.",
    ),
]
_MILLISECONDS = {"min": 1, "max": 2_073_600_000}
HAPROXY = [
    cfg.IntOpt(
        "timeout_client_data",
        default=50_000,
        **_MILLISECONDS,
        help="Milliseconds a client may be silent. This and all that follows: where neither listener nor flavor says.",
    ),
    cfg.IntOpt(
        "timeout_member_connect",
        default=5_000,
        **_MILLISECONDS,
        help="Milliseconds a connection to a member may take.",
    ),
    cfg.IntOpt("timeout_member_data", default=50_000, **_MILLISECONDS, help="Milliseconds a member may be silent."),
    cfg.IntOpt(
        "timeout_tunnel",
        **_MILLISECONDS,
        help="Milliseconds both sides of an upgraded or tunnelled connection may be silent. Without it, an hour where "
        "HTTP is spoken, and the timeouts of client and member elsewhere.",
    ),
    cfg.IntOpt(
        "timeout_http_request",
        default=10_000,
        **_MILLISECONDS,
        help="Milliseconds a client may take to send the head of a request.",
    ),
    cfg.IntOpt(
        "connection_limit",
        min=1,
        max=1_000_000,
        help="Connections at once to one listener. Without it, as many as its amphora takes.",
    ),
    cfg.IntOpt(
        "process_connection_limit",
        min=1,
        max=1_000_000,
        help="Connections at once to all listeners of an amphora. Without it, what its memory allows.",
    ),
    cfg.IntOpt("process_threads", min=1, max=64, help="Threads of HAProxy. Without it, one for each processor."),
    cfg.StrOpt(
        "tls_minimum_version",
        choices=["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"],
        help="Oldest TLS version that listeners and pools speak. Without it, what they say themselves.",
    ),
    cfg.StrOpt("tls_ciphers", help="TLS ciphers in OpenSSL's notation. Without it, OpenSSL's own."),
    cfg.BoolOpt("connection_logging", default=False, help="Whether each connection or request is logged."),
    cfg.StrOpt("log_format", help="HAProxy's log-format of those lines. Without it, that of Octavia's flow logs."),
]
VRRP = [
    cfg.FloatOpt(
        "advert_interval",
        default=1.0,
        min=0.05,
        max=40.0,
        help="Seconds between two signs of life of the amphora that has the VIPs. A standby takes over after three to "
        "four of them. For load balancers whose flavor does not say.",
    ),
]
TLS = [
    cfg.FloatOpt(
        "ticket_key_period",
        default=43_200.0,
        min=1.0,
        help="Seconds for which TLS session tickets of a load balancer are sealed with one key. They can be used for "
        "as long again. The amphorae of a load balancer have the same keys.",
    ),
]
COMPUTE = [
    cfg.StrOpt(
        "driver",
        default="netns",
        help="Compute backend of new load balancers whose flavor names none (entry point amphora_driver.compute).",
    ),
    cfg.ListOpt(
        "enabled_drivers",
        default=[],
        help="More compute backends that flavors may name, or that load balancers are still with.",
    ),
]
NETWORK = [
    cfg.StrOpt(
        "driver",
        default="local",
        help="Network backend from which new load balancers take VIPs and ports (entry point amphora_driver.network).",
    ),
    cfg.ListOpt(
        "enabled_drivers", default=[], help="More network backends, for load balancers that are still with them."
    ),
    cfg.FloatOpt(
        "vip_patience",
        default=300.0,
        min=0.0,
        help="Seconds that a network backend may take for the addresses of a load balancer, before its user is told. "
        "It is asked on even then.",
    ),
]
NETWORK_LOCAL = [
    cfg.StrOpt("switch", default="amp-switch", help="Network namespace that holds the bridges."),
]
CERTIFICATES = [
    cfg.StrOpt(
        "ca_certificate",
        default="/etc/amphora-driver/amphora_ca.pem",
        help="Certificate of the authority that signs the amphorae's certificates.",
    ),
    cfg.StrOpt("ca_private_key", default="/etc/amphora-driver/amphora_ca.key", help="Its private key."),
    cfg.StrOpt(
        "client_ca",
        default="/etc/amphora-driver/controller_ca.pem",
        help="Certificate of the authority that signs the controllers' certificates; amphorae trust no other.",
    ),
    cfg.StrOpt(
        "client_certificate",
        default="/etc/amphora-driver/controller.pem",
        help="The controllers' own certificate and private key, in one PEM file.",
    ),
    cfg.IntOpt("validity_days", default=7, min=1, help="Days for which an amphora's certificate is valid."),
    cfg.FloatOpt(
        "renew_at",
        default=0.5,
        min=0.01,
        max=0.99,
        help="The part of its life after which an amphora's certificate is renewed.",
    ),
    cfg.FloatOpt(
        "settle",
        default=90.0,
        min=1.0,
        help="Seconds that each step of an authority's rotation lasts at the least. Longer than an idle connection to "
        "an agent lives (75), so that nothing goes on that was begun before the last step.",
    ),
]
FAILOVER = [
    cfg.BoolOpt("automatic", default=True, help="Whether amphorae that are silent are replaced unasked."),
    cfg.FloatOpt(
        "silent_after",
        default=7.0,
        min=0.2,
        help="Seconds without a heartbeat after which an amphora is asked itself, and replaced if it does not answer. "
        "More than two intervals of heartbeats. Time in which the control plane could not hear does not count.",
    ),
    cfg.FloatOpt(
        "mute_after",
        default=120.0,
        min=0.0,
        help="Seconds without a heartbeat after which an amphora is replaced although its agent answers.",
    ),
    cfg.FloatOpt(
        "probe_timeout", default=2.0, min=0.1, help="Seconds that the agent of a silent amphora has for an answer."
    ),
    cfg.ListOpt(
        "witnesses",
        default=[],
        help="host:port of machines on the management network that always listen. If none of them can be reached, the "
        "control plane takes itself for blind, and no amphora for dead.",
    ),
    cfg.FloatOpt(
        "breaker_percent",
        default=20.0,
        min=0.0,
        max=100.0,
        help="If more than this part of all amphorae fall silent within breaker_window, nothing is replaced unasked.",
    ),
    cfg.IntOpt("breaker_floor", default=3, min=1, help="So few silent amphorae never open the breaker by their part."),
    cfg.IntOpt(
        "breaker_most",
        default=50,
        min=1,
        help="If more than so many amphorae fall silent within breaker_window, nothing is replaced unasked.",
    ),
    cfg.FloatOpt("breaker_window", default=120.0, min=1.0, help="Seconds that are looked at together by the breaker."),
    cfg.FloatOpt(
        "breaker_calm",
        default=30.0,
        min=0.0,
        help="Seconds for which fewer have to be silent before the breaker closes again.",
    ),
    cfg.FloatOpt(
        "breaker_trial",
        default=600.0,
        min=0.0,
        help="Seconds after which an open breaker lets one fail-over through at a time, to see whether it succeeds.",
    ),
    cfg.IntOpt("most_at_once", default=5, min=1, help="Fail-overs nobody asked for that go on at the same time."),
    cfg.FloatOpt(
        "pause_first",
        default=60.0,
        min=0.0,
        help="Seconds after a fail-over nobody asked for, before the next one of the same load balancer; doubles each "
        "time.",
    ),
    cfg.FloatOpt("pause_most", default=3600.0, min=0.0, help="Longest such pause, in seconds."),
    cfg.FloatOpt(
        "keep_history", default=7_776_000.0, min=0.0, help="Seconds for which causes and time lines are kept."
    ),
]
SPARES = [
    cfg.IntOpt(
        "number",
        default=0,
        min=0,
        max=100,
        help="Amphorae kept booted in advance, for each kind of machine that load balancers use whose flavor does not "
        "say how many. They make a fail-over about as quick as a change.",
    ),
]
ROTATION = [
    cfg.FloatOpt(
        "settle",
        default=10.0,
        min=0.0,
        help="Seconds for which the new amphorae of a load balancer are watched before the next one's are replaced.",
    ),
    cfg.FloatOpt(
        "patience",
        default=900.0,
        min=1.0,
        help="Seconds after which a load balancer whose amphorae are not replaced has failed; the rotation pauses.",
    ),
    cfg.IntOpt(
        "image_days", default=90, min=0, help="Age of an image in days, from which status check warns; 0: never."
    ),
]
AUDIT = [
    cfg.FloatOpt(
        "interval",
        default=600.0,
        min=1.0,
        help="Seconds between two comparisons of an amphora with what is wanted.",
    ),
    cfg.IntOpt("most_at_once", default=4, min=1, help="Amphorae that are compared at the same time."),
    cfg.FloatOpt(
        "renderer_pause",
        default=10.0,
        min=0.0,
        help="Seconds between two load balancers that are pushed only because this version, or another configuration, "
        "renders them in another way.",
    ),
    cfg.FloatOpt(
        "agent_interval",
        default=30.0,
        min=0.1,
        help="Seconds between two looks of an agent at its own machine, for what differs from what it has confirmed.",
    ),
]
STATUS = [
    cfg.StrOpt(
        "bind_address", default="127.0.0.1", help="Address of the status page and of the metrics of a controller."
    ),
    cfg.PortOpt("bind_port", default=9878, min=0, help="Port of the status page of a controller; 0 for none."),
    cfg.PortOpt("health_bind_port", default=9877, min=0, help="The same of a health manager."),
    cfg.PortOpt(
        "provider_agent_port",
        default=0,
        min=0,
        help="The same of the provider agent, which octavia-driver-agent runs. None by default: Octavia's hosts are "
        "not ours, and nobody expects another open port there.",
    ),
    cfg.StrOpt(
        "token_file",
        help="File whose first line is asked of everybody who looks, as a bearer token or with any user's name. "
        "Without it, only this host is answered.",
    ),
    cfg.StrOpt("certificate", help="Server certificate and private key in one PEM file; without it, plain HTTP."),
]
GROUPS: dict[str, list[cfg.Opt]] = {
    "store": STORE,
    "queue": QUEUE,
    "controller": CONTROLLER,
    "agent": AGENT,
    "octavia": OCTAVIA,
    "health": HEALTH,
    "haproxy": HAPROXY,
    "vrrp": VRRP,
    "tls": TLS,
    "compute": COMPUTE,
    "compute_netns": COMPUTE_NETNS,
    "compute_qemu": COMPUTE_QEMU,
    "network": NETWORK,
    "network_local": NETWORK_LOCAL,
    "certificates": CERTIFICATES,
    "failover": FAILOVER,
    "spares": SPARES,
    "rotation": ROTATION,
    "audit": AUDIT,
    "status": STATUS,
}


def load(files: Sequence[str] | None = None) -> cfg.ConfigOpts:
    """Read the options.

    Args:
        files: configuration files; None for the one named in the environment, or the default one.

    Raises:
        ConfigurationError: a file that was asked for is missing or not understood.
    """
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    for group, options in GROUPS.items():
        conf.register_opts(options, group=group)
    named = os.environ.get(FILE_VARIABLE)
    if files is None:
        files = [named] if named else [path for path in (DEFAULT_FILE,) if os.path.exists(path)]  # noqa: PTH110 - text paths for oslo.config
    try:
        conf([], project="amphora-driver", default_config_files=list(files), default_config_dirs=[])
    except cfg.Error as error:
        raise ConfigurationError("read the configuration", str(error), f"See {', '.join(files)}.") from error
    return conf


@lru_cache(maxsize=1)
def shared() -> cfg.ConfigOpts:
    """The options of this process, read once."""
    return load()


def list_opts() -> list[tuple[str, list[cfg.Opt]]]:
    """All options by group, for oslo-config-generator."""
    return list(GROUPS.items())
