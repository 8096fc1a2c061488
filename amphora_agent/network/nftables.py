# SPDX-License-Identifier: Apache-2.0
"""Put a rendered table into the kernel.

Invariant: what the kernel holds is replaced in one transaction or not at all, and left alone if it is as wanted. Called
in the namespace it is about.
"""

from __future__ import annotations

import re

from amphora_agent.errors import FirewallError
from amphora_agent.network import libnftables
from amphora_agent.network.firewall import FAMILY, TABLE
from amphora_agent.network.libnftables import STATELESS, NftError

_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_MISSING = f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"
# How nft 1.1.3 (Debian 13) lists flags among a mask.
_FLAGS = re.compile(r"tcp flags & \(([0-9a-fx| ]+)\) == (0x[0-9a-f]+(?: \| 0x[0-9a-f]+)*)")


def replace(text: str) -> bool:
    """Make the kernel hold this table, rendered by `firewall.render`; an empty text takes it away.

    Returns:
        Whether it held something else before.

    Raises:
        FirewallError: it cannot; what it held before is still in force.
    """
    if same(text):
        return False
    _run(_MISSING + text)
    return True


def execute(commands: str) -> None:
    """Carry out commands about other tables than the one that restricts clients.

    Raises:
        FirewallError: nothing of it was carried out.
    """
    _run(commands)


def same(text: str) -> bool:
    """Whether the kernel holds exactly this."""
    return _FLAGS.sub(_older, current()).split() == text.split()


def _older(found: re.Match[str]) -> str:
    """The same as nft 1.0.6 lists it, and as it is rendered."""
    mask, value = (found[number].replace(" | ", ",") for number in (1, 2))
    return f"tcp flags {value} / {mask}"


def current(*, counters: bool = False) -> str:
    """The table as nft lists it; empty if there is none.

    Raises:
        FirewallError: there is one, and it cannot be read.
    """
    if not exists(FAMILY, TABLE):
        return ""
    return _run(f"list table {FAMILY} {TABLE}\n", 0 if counters else STATELESS)


def exists(family: str, table: str) -> bool:
    """Whether the kernel has such a table."""
    return libnftables.exists(family, table)


def _run(commands: str, flags: int = 0) -> str:
    try:
        return libnftables.run(commands, flags)
    except NftError as error:
        raise FirewallError("restrict who may connect", str(error), _REMEDY) from error
