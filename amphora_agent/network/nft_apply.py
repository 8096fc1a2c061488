# SPDX-License-Identifier: Apache-2.0
"""Load the rendered firewall table into the kernel.

Invariant: one transaction replaces the rules in the kernel, or nothing changes. Rules that are as wanted are not
touched. All functions run in the namespace that has the table.

A separate transaction adds sets before, because the kernel activates rules a moment before the sets of the same
transaction. With Linux 6.18 the kernel refused about one in a thousand connections that began at this moment.
"""

from __future__ import annotations

import logging
import re

from amphora_agent.errors import FirewallError
from amphora_agent.network import libnftables
from amphora_agent.network.firewall import FAMILY, TABLE
from amphora_agent.network.libnftables import REMEDY, STATELESS, NftError

_log = logging.getLogger(__name__)
_MISSING = f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"
# Sets, chains and kinds of objects in nft's listing of a table.
_SETS = re.compile(r"^\tset (?P<name>\S+) \{\n.*?^\t\}\n\n?", re.MULTILINE | re.DOTALL)
_CHAINS = re.compile(r"^\tchain (\S+) \{", re.MULTILINE)
_OBJECTS = re.compile(r"^\t(\w+) ", re.MULTILINE)
# TCP flags with a mask as nft 1.1.3 (Debian 13) lists them. They are rewritten to the form of nft 1.0.6 before a
# comparison.
_FLAGS = re.compile(r"tcp flags & \(([0-9a-fx| ]+)\) == (0x[0-9a-f]+(?: \| 0x[0-9a-f]+)*)")


def replace_table(text: str) -> bool:
    """Replace the table by the text of `firewall.render`; an empty text deletes the table.

    Returns whether the kernel had another table before. Raises FirewallError if the kernel refuses the rules; the
    previous table is still in force.
    """
    held = list_table()
    if _comparable(held) == _comparable(text):
        return False
    try:
        for transaction in plan_transactions(held, text):
            execute(transaction)
    except FirewallError as error:
        _log.warning(
            "The kernel refused an incremental change of the firewall rules, so the agent replaces the whole table: %s",
            error,
        )
        execute(_MISSING + text)
    return True


def plan_transactions(held: str, wanted: str) -> list[str]:
    """Return the transactions that change one table, as nft lists it, into another one."""
    before, after = _sets(held), _sets(wanted)
    foreign = set(_OBJECTS.findall(held)) - {"set", "chain"}
    changed = any(name in after and after[name].split() != block.split() for name, block in before.items())
    if not wanted or foreign or changed:
        # The agent replaces the whole table if the wanted table is empty, or if another program has changed the present
        # table.
        return [_MISSING + wanted]
    new_sets = "".join(block for name, block in after.items() if name not in before)
    rules = [f"delete chain {FAMILY} {TABLE} {name}\n" for name in _CHAINS.findall(held)]
    rules = [f"flush table {FAMILY} {TABLE}\n", *rules] if rules else []
    rules.append(_SETS.sub("", wanted))
    rules += [f"delete set {FAMILY} {TABLE} {name}\n" for name in before if name not in after]
    return [*([f"table {FAMILY} {TABLE} {{\n{new_sets}}}\n"] if new_sets else []), "".join(rules)]


def _sets(text: str) -> dict[str, str]:
    return {found["name"]: found[0] for found in _SETS.finditer(text)}


def _comparable(text: str) -> tuple[list[list[str]], list[str]]:
    """Return the table with TCP flags in one style, without the order of its sets."""
    text = _FLAGS.sub(_old_style, text)
    return sorted(block.split() for block in _sets(text).values()), _SETS.sub("", text).split()


def holds(text: str) -> bool:
    """Return whether the kernel has exactly this table."""
    return _comparable(list_table()) == _comparable(text)


def _old_style(found: re.Match[str]) -> str:
    """Return TCP flags as nft 1.0.6 lists them, and as the agent renders them."""
    mask, value = (found[number].replace(" | ", ",") for number in (1, 2))
    return f"tcp flags {value} / {mask}"


def list_table(*, counters: bool = False) -> str:
    """Return the table as nft lists it; empty without a table. Raises FirewallError."""
    if not libnftables.table_exists(FAMILY, TABLE):
        return ""
    return execute(f"list table {FAMILY} {TABLE}\n", 0 if counters else STATELESS)


def execute(commands: str, flags: int = 0) -> str:
    """Run commands in one transaction; returns nft's output. After a FirewallError nothing has changed."""
    try:
        return libnftables.run_commands(commands, flags)
    except NftError as error:
        raise FirewallError("load the firewall rules of the amphora", str(error), REMEDY) from error
