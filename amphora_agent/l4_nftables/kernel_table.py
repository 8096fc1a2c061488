# SPDX-License-Identifier: Apache-2.0
"""Read parts of the kernel's table without its elements, by netlink (linux/netfilter/nf_tables.h).

libnftables reads all elements of all sets before it lists anything of a table: 120 ms with 10,000 members.
"""

from __future__ import annotations

import zlib

from amphora_agent.l4 import netlink
from amphora_agent.network.libnftables import NftError

_SUBSYSTEM = 10 << 8
_GET_CHAINS, _GET_RULES, _GET_SETS, _GET_OBJECTS = (_SUBSYSTEM | number for number in (4, 7, 10, 19))
# The attribute of the table's name is the first one in chains, rules, sets and objects.
_TABLE = 1
_OBJECT_NAME, _OBJECT_TYPE, _OBJECT_DATA, _COUNTER = 2, 3, 4, 1
_BYTES, _PACKETS = 1, 2
_INET = 1
_RULE_KINDS = (_GET_CHAINS, _GET_RULES, _GET_SETS)
_TIMEOUT_SECONDS = 30.0
# Number of attempts to read objects that other programs change at the same time.
_ATTEMPTS = 5


def counters(table: str) -> dict[str, tuple[int, int]]:
    """Return packets and bytes of the named counters of a table of the family inet; raises NftError."""
    found = {}
    for message in _read(_GET_OBJECTS, table):
        values = netlink.attributes(message)
        data = netlink.attributes(values.get(_OBJECT_DATA, b""))
        if int.from_bytes(values.get(_OBJECT_TYPE, b""), "big") == _COUNTER:
            name = values[_OBJECT_NAME].rstrip(b"\0").decode()
            found[name] = (int.from_bytes(data[_PACKETS], "big"), int.from_bytes(data[_BYTES], "big"))
    return found


def structure(table: str) -> int:
    """Return a checksum of chains, rules and declarations of sets, without elements; raises NftError."""
    found = 0
    for kind in _RULE_KINDS:
        for message in _read(kind, table):
            found = zlib.crc32(message, found)
    return found


def _read(kind: int, table: str) -> list[bytes]:
    """Return the attributes of each object of a table.

    A change of any rules of the namespace interrupts a dump, which is then repeated.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _dump(kind, table)
        except InterruptedError:
            continue
        except OSError as error:
            raise NftError(f"the kernel's table cannot be read: {error}") from error
    raise NftError(f"the kernel's table cannot be read: other programs changed rules during {_ATTEMPTS} attempts")


def _dump(kind: int, table: str) -> list[bytes]:
    wanted = table.encode() + b"\0"
    request = netlink.netfilter_message(kind, netlink.DUMP, _INET, netlink.attribute(_TABLE, wanted))
    with netlink.open_socket(netlink.NETFILTER, timeout=_TIMEOUT_SECONDS) as link:
        every = [
            answer[at + netlink.FIRST_ATTRIBUTE : end]
            for answer, spans in netlink.dump(link, request)
            for at, end in spans
        ]
    # Older kernels ignore the name in a request, so messages of other tables are omitted here.
    return [one for one in every if netlink.attributes(one).get(_TABLE) == wanted]
