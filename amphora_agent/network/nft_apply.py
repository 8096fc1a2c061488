# SPDX-License-Identifier: Apache-2.0
"""Put a rendered table into the kernel.

Invariant: the rules the kernel holds are replaced in one transaction or not at all, and left alone if they are as
wanted. Called in the namespace it is about.

Sets of ranges are there before, in a transaction of their own: the kernel lets rules be asked a moment before the sets
that came with them can be (measured with Linux 6.18; one connection in some thousand that began just then was refused).
"""

from __future__ import annotations

import logging
import re

from amphora_agent.errors import FirewallError
from amphora_agent.network import libnftables
from amphora_agent.network.firewall import FAMILY, TABLE
from amphora_agent.network.libnftables import STATELESS, NftError

_log = logging.getLogger(__name__)
_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_MISSING = f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"
# What is in a table, as nft lists it.
_SETS = re.compile(r"^\tset (?P<name>\S+) \{\n.*?^\t\}\n\n?", re.MULTILINE | re.DOTALL)
_CHAINS = re.compile(r"^\tchain (\S+) \{", re.MULTILINE)
_OBJECTS = re.compile(r"^\t(\w+) ", re.MULTILINE)
# How nft 1.1.3 (Debian 13) lists flags among a mask.
_FLAGS = re.compile(r"tcp flags & \(([0-9a-fx| ]+)\) == (0x[0-9a-f]+(?: \| 0x[0-9a-f]+)*)")


def replace(text: str) -> bool:
    """Make the kernel hold this table, rendered by `firewall.render`; an empty text takes it away.

    Returns:
        Whether it held something else before.

    Raises:
        FirewallError: it cannot; what it held before is still in force.
    """
    held = _FLAGS.sub(_older, current())
    if _comparable(held) == _comparable(text):
        return False
    try:
        for order in orders(held, text):
            _run(order)
    except FirewallError as error:
        _log.warning("The rules are replaced as a whole: %s", error)
        _run(_MISSING + text)
    return True


def orders(held: str, wanted: str) -> list[str]:
    """Pure: the transactions that lead from one table, as nft lists it, to another one."""
    before, after = _sets(held), _sets(wanted)
    foreign = set(_OBJECTS.findall(held)) - {"set", "chain"}
    changed = any(name in after and after[name].split() != block.split() for name, block in before.items())
    if not wanted or foreign or changed:
        # Nothing is to be left, or somebody's hand has been in it: that is not worth more.
        return [_MISSING + wanted]
    coming = "".join(block for name, block in after.items() if name not in before)
    rules = [f"delete chain {FAMILY} {TABLE} {name}\n" for name in _CHAINS.findall(held)]
    rules = [f"flush table {FAMILY} {TABLE}\n", *rules] if rules else []
    rules.append(_SETS.sub("", wanted))
    rules += [f"delete set {FAMILY} {TABLE} {name}\n" for name in before if name not in after]
    return [*([f"table {FAMILY} {TABLE} {{\n{coming}}}\n"] if coming else []), "".join(rules)]


def _sets(text: str) -> dict[str, str]:
    return {found["name"]: found[0] for found in _SETS.finditer(text)}


def _comparable(text: str) -> tuple[list[list[str]], list[str]]:
    """Sets are listed in the order in which they came."""
    return sorted(block.split() for block in _sets(text).values()), _SETS.sub("", text).split()


def execute(commands: str) -> None:
    """Carry out commands about other tables than the one that restricts clients.

    Raises:
        FirewallError: nothing of it was carried out.
    """
    _run(commands)


def same(text: str) -> bool:
    """Whether the kernel holds exactly this."""
    return _comparable(_FLAGS.sub(_older, current())) == _comparable(text)


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
