# SPDX-License-Identifier: Apache-2.0
"""The harness's load balancers without what this provider does not serve yet, for both sides alike.

Left out: inserted headers (every size), TLS (size L), L7 policies with their rules (size M). Listeners, pools,
members and health monitors stay. Name this module instead of the adapter's own: `plain:Upstream`, `plain:Haproxy`.
"""

import importlib

from benchlib import workloads

_whole = workloads.spec


def spec(*args, **kwargs):
    """As the harness's own `spec`, reduced."""
    made = _whole(*args, **kwargs)
    for listener in made["listeners"]:
        listener.update(protocol="HTTP", tls=False, insert_headers={}, l7policies=[])
    return made


workloads.spec = spec


def __getattr__(name):
    return getattr(importlib.import_module("adapters.upstream" if name == "Upstream" else "adapter"), name)
