# SPDX-License-Identifier: Apache-2.0
"""Put a rendered table into the kernel.

Invariant: what the kernel holds is replaced in one transaction or not at all, and left alone if it is as wanted. Called
in the namespace it is about. libnftables is loaded when it is first needed: an amphora that restricts nobody does
without its 3.5 MiB.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from amphora_agent.errors import FirewallError
from amphora_agent.network.firewall import FAMILY, TABLE

_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_LIBRARY = "libnftables.so.1"
_TIMEOUT_SECONDS = 30
_FD_SETSIZE = 1024
# nftables/libnftables.h: no counters; numbers for protocols, priorities, symbols and times
_STATELESS, _NUMERIC = 1 << 2, 0b1111 << 7
_MISSING = f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"
# linux/netlink.h, linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h
_NETLINK_NETFILTER, _NLM_F_REQUEST, _NLMSG_ERROR = 12, 1, 2
_GET_TABLE, _TABLE_NAME = 10 << 8 | 1, 1
_FAMILIES = {"inet": 1, "netdev": 5}


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
    return current().split() == text.split()


def current(*, counters: bool = False) -> str:
    """The table as nft lists it; empty if there is none.

    Raises:
        FirewallError: there is one, and it cannot be read.
    """
    if not exists(FAMILY, TABLE):
        return ""
    return _run(f"list table {FAMILY} {TABLE}\n", 0 if counters else _STATELESS)


def exists(family: str, table: str) -> bool:
    """Ask the kernel alone, without libnftables; one without nf_tables has no table either."""
    name = table.encode() + b"\0"
    attribute = struct.pack("=HH", 4 + len(name), _TABLE_NAME) + name
    body = struct.pack("=BBH", _FAMILIES[family], 0, 0) + attribute
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as link:
            link.settimeout(_TIMEOUT_SECONDS)
            link.bind((0, 0))
            link.send(struct.pack("=IHHII", 16 + len(body), _GET_TABLE, _NLM_F_REQUEST, 1, 0) + body)
            answer = link.recv(65536)
    except OSError:
        return False
    kind, result = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    return not (kind == _NLMSG_ERROR and result in (-errno.ENOENT, -errno.EOPNOTSUPP, -errno.EINVAL))


def _run(commands: str, flags: int = 0) -> str:
    library = _library() if _is_low() else None
    try:
        status, output, said = (
            _by_command(commands, flags) if library is None else _by_library(library, commands, flags)
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FirewallError("restrict who may connect", f"nft cannot be run: {error}", _REMEDY) from error
    if status != 0:
        # The first line is the reason, the next ones repeat the command.
        lines = said.splitlines() or [f"status {status}"]
        raise FirewallError("restrict who may connect", f"nftables refused: {lines[0]}", _REMEDY)
    return output


def _is_low() -> bool:
    """Whether the library's socket will have a number that select(2) can wait for; with a higher one it aborts."""
    with Path("/dev/null").open("rb") as next_one:
        return next_one.fileno() < _FD_SETSIZE


@functools.cache
def _library() -> Any:
    """libnftables, or None without it."""
    try:
        found = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    context, text, flags = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint
    for name, result, arguments in (
        ("nft_ctx_new", context, [ctypes.c_uint32]),
        ("nft_ctx_free", None, [context]),
        ("nft_ctx_buffer_output", ctypes.c_int, [context]),
        ("nft_ctx_buffer_error", ctypes.c_int, [context]),
        ("nft_ctx_output_set_flags", None, [context, flags]),
        ("nft_run_cmd_from_buffer", ctypes.c_int, [context, text]),
        ("nft_ctx_get_output_buffer", text, [context]),
        ("nft_ctx_get_error_buffer", text, [context]),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def _by_library(library: Any, commands: str, flags: int) -> tuple[int, str, str]:
    """A context belongs to the namespace in which it was made."""
    context = library.nft_ctx_new(0)
    if not context:
        raise OSError("libnftables has no context")
    try:
        library.nft_ctx_buffer_output(context)
        library.nft_ctx_buffer_error(context)
        library.nft_ctx_output_set_flags(context, flags | _NUMERIC)
        status = library.nft_run_cmd_from_buffer(context, commands.encode())
        output, said = library.nft_ctx_get_output_buffer(context), library.nft_ctx_get_error_buffer(context)
        return status, (output or b"").decode(), (said or b"").decode()
    finally:
        library.nft_ctx_free(context)


def _by_command(commands: str, flags: int) -> tuple[int, str, str]:
    words = ["nft", "-n", *(["-s"] if flags & _STATELESS else []), "-f", "-"]
    done = subprocess.run(words, input=commands, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    return done.returncode, done.stdout, done.stderr
