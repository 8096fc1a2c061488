# SPDX-License-Identifier: Apache-2.0
"""Options of HAProxy and keepalived: groups [amp_haproxy], [amp_tls] (session tickets) and [amp_vrrp]."""

from __future__ import annotations

from oslo_config import cfg

_MILLISECONDS = {"min": 1, "max": 2_073_600_000}

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    "amp_haproxy": {
        cfg.IntOpt("timeout_client_data", default=50_000, **_MILLISECONDS): (
            "Milliseconds without data from a client until HAProxy closes the connection. Like all options of this "
            "group, a default for listeners and flavors without a value of their own. 1 to 2073600000 (24 days)."
        ),
        cfg.IntOpt("timeout_member_connect", default=5_000, **_MILLISECONDS): (
            "Time limit in milliseconds for a TCP connection to a member. 1 to 2073600000."
        ),
        cfg.IntOpt("timeout_member_data", default=50_000, **_MILLISECONDS): (
            "Milliseconds without data from a member until HAProxy closes the connection. 1 to 2073600000."
        ),
        cfg.IntOpt("timeout_tunnel", **_MILLISECONDS): (
            "Milliseconds without data in both directions until HAProxy closes a tunnel, such as a WebSocket. 1 to "
            "2073600000. Default: one hour for HTTP listeners; the client and member timeouts for others."
        ),
        cfg.IntOpt("timeout_http_request", default=10_000, **_MILLISECONDS): (
            "Time limit in milliseconds for a client to send the headers of a request. 1 to 2073600000."
        ),
        cfg.IntOpt("connection_limit", min=1, max=1_000_000): (
            "Largest number of concurrent connections to one listener. 1 to 1000000. Default: the limit of the amphora."
        ),
        cfg.IntOpt("process_connection_limit", min=1, max=1_000_000): (
            "Largest number of concurrent connections to all listeners of an amphora. 1 to 1000000. Default: the agent "
            "computes it from the amphora's memory."
        ),
        cfg.IntOpt("process_threads", min=1, max=64): (
            "Number of HAProxy's threads. 1 to 64. Default: one thread per processor."
        ),
        cfg.StrOpt("tls_minimum_version", choices=["TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3"]): (
            "Oldest TLS version that listeners and pools accept. Default: the versions of the listener or pool."
        ),
        cfg.StrOpt("tls_ciphers"): (
            "TLS ciphers of listeners and pools in OpenSSL's notation. Default: OpenSSL's own list."
        ),
        cfg.BoolOpt("connection_logging", default=False): (
            "Whether HAProxy logs each TCP connection or HTTP request. The default false writes no such log."
        ),
        cfg.StrOpt("log_format"): (
            "Format of the log lines of connection_logging, in HAProxy's log-format language. Default: the format of "
            "Octavia's flow logs."
        ),
    },
    "amp_tls": {
        cfg.FloatOpt("ticket_key_period", default=43_200.0, min=1.0): (
            "Seconds for which a load balancer encrypts TLS session tickets with one key. A client can resume a "
            "session with a ticket for as long again. All amphorae of a load balancer have the same keys. At least 1."
        ),
        cfg.IntOpt("expiry_days", default=30, min=0): (
            "Days before the expiry of a listener's or pool's certificate from which the status page, the metrics and "
            "`amphoractl status check` warn. With 0 they warn only after the expiry."
        ),
    },
    "amp_vrrp": {
        cfg.FloatOpt("advert_interval", default=1.0, min=0.05, max=40.0): (
            "Seconds between two VRRP advertisements of the amphora that holds the VIPs. The standby takes over after "
            "three to four missing advertisements. A flavor can set another value. 0.05 to 40."
        )
    },
}
