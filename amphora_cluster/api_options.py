# SPDX-License-Identifier: Apache-2.0
"""Options of the HTTP API: [amp_cluster_api]."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "amp_cluster_api"

OPTIONS: dict[str, dict[cfg.Opt, str]] = {
    GROUP: {
        cfg.HostAddressOpt("bind_address", default="127.0.0.1"): (
            "Address of the API. An address other than loopback needs a certificate, or tls_proxy, because requests "
            "contain tokens."
        ),
        cfg.PortOpt("bind_port", default=9880, min=1): "TCP port of the API. 1 to 65535.",
        cfg.StrOpt("certificate"): (
            "Path of the TLS certificate in PEM, with the intermediate ones. The default is none: plain HTTP."
        ),
        cfg.StrOpt("private_key"): "Path of the private key of the certificate, in PEM. The default is none.",
        cfg.BoolOpt("tls_proxy", default=False): (
            "A proxy with TLS on another host forwards the requests, over a network that is protected. Allows plain "
            "HTTP on any address. The last address in X-Forwarded-For is then the source address of a request, so the "
            "proxy must add it. Requests from loopback always have this source address, if the header exists."
        ),
        cfg.IntOpt("workers", default=2, min=1, max=64): "Number of processes. 1 to 64.",
        cfg.IntOpt("threads", default=16, min=2, max=256): (
            "Number of threads in each process. At most all but two of them wait for the end of requests. 2 to 256."
        ),
        cfg.IntOpt("failed_attempts", default=10, min=0, max=100000): (
            "Number of failed authentications of one source address without a pause, for all worker processes of this "
            "host together. Each further one begins a pause, of 1 to 60 s, in which unknown callers from this address "
            "get the status 429. The limit of a group, for all addresses together, is ten times as high. 0 disables "
            "both. 0 to 100000."
        ),
        cfg.FloatOpt("longest_wait", default=300.0, min=0.0, max=3600.0): (
            "Longest time in seconds for which a request can wait for its end with ?wait=SECONDS. 0 to 3600."
        ),
    }
}
