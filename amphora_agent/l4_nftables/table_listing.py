# SPDX-License-Identifier: Apache-2.0
"""Compare the elements in nft's listing of a table with the elements of `ruleset.Table`. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Set as AbstractSet

from amphora_agent.l4_nftables.ruleset import Table

_BLOCK = re.compile(r"^\t(?:map|set) (\S+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
_ELEMENTS = re.compile(r"elements = \{(.*?)\}", re.DOTALL)
_SEPARATOR = re.compile(r",\s*")


def has_elements(listed: str, table: Table) -> bool:
    """Return whether a listing has exactly the maps, the sets and their elements of a table."""
    blocks = {name: _elements(text) for name, text in _BLOCK.findall(listed)}
    if blocks.keys() != table.maps.keys():
        return False
    return all(
        _same(blocks[name], {f"{key} : {value}" if value else key for key, value in one.elements.items()})
        for name, one in table.maps.items()
    )


def _elements(text: str) -> AbstractSet[str]:
    found = _ELEMENTS.search(text)
    return set() if found is None else {one.removesuffix(" counter") for one in _SEPARATOR.split(found[1].strip())}


def _same(listed: AbstractSet[str], wanted: AbstractSet[str]) -> bool:
    # The C library writes some IPv6 addresses differently, for example those of ::ffff:0:0/96.
    return listed == wanted or {*map(_canonical, listed)} == {*map(_canonical, wanted)}


def _canonical(element: str) -> str:
    return " ".join(str(ipaddress.ip_address(word)) if word.count(":") > 1 else word for word in element.split())
