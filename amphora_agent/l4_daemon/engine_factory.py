# SPDX-License-Identifier: Apache-2.0
"""Which engine forwards.

Invariant: the one that was configured, or else none. "auto" is nftables: it needs no second daemon and no state that
partners have to send each other, and counts at once (docs/udp.md). IPVS is for who wants what only it has.
"""

from __future__ import annotations

from amphora_agent.errors import SettingsError
from amphora_agent.l4.engine import Engine
from amphora_agent.l4_ipvs import netlink


def choose(configured: str, run: str) -> Engine:
    """The engine of this namespace.

    Args:
        configured: "auto", "nftables" or "lvs" (agent.conf, ``[virtual_servers] engine``).
        run: the directory in which an engine may keep files for other processes.

    Raises:
        SettingsError: the kernel does not have what is configured.
    """
    if configured != "lvs":
        from amphora_agent.l4_nftables.engine import NftablesEngine  # noqa: PLC0415 (loads what it needs)

        return NftablesEngine()
    if not netlink.available():
        raise SettingsError(
            "forward by lvs", "this kernel has no IPVS", "Load ip_vs, or set [virtual_servers] engine = auto."
        )
    from amphora_agent.l4_ipvs.engine import LvsEngine  # noqa: PLC0415 (loads what it needs)

    return LvsEngine(run)
