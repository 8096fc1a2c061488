# SPDX-License-Identifier: Apache-2.0
"""Run nft commands through libnftables, or through the nft program.

Invariant: one call is one transaction, in the namespace of the calling thread. The first call loads libnftables (3.5
MiB). The L4 daemon imports this module too, so it stays small.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from typing import Any

from amphora_agent.l4 import netlink

REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_LIBRARY = "libnftables.so.1"
_TIMEOUT_SECONDS = 30
_FD_SETSIZE = 1024
# Flags of nftables/libnftables.h: list tables without counters, and with numbers in place of names.
STATELESS, _NUMERIC = 1 << 2, 0b1111 << 7
# Netlink requests for a table and for the generation of the ruleset (linux/netfilter/nf_tables.h).
_GET_TABLE, _TABLE_NAME = 10 << 8 | 1, 1
_GET_GENERATION, _GENERATION_ANSWER, _GENERATION_ID = 10 << 8 | 16, 10 << 8 | 15, 1
_FAMILIES = {"unspec": 0, "inet": 1, "netdev": 5}


class NftError(Exception):
    """nftables is not available, or refused a command; the argument is a sentence."""


def run_commands(commands: str, flags: int = 0) -> str:
    """Run commands as one transaction; returns the output of nft. After an NftError nothing has changed."""
    library = _library() if _is_low() else None
    status, output, message = _by_command(commands, flags) if library is None else _by_library(library, commands, flags)
    if status != 0:
        # The first line of nftables' message is the reason, and the next lines repeat the command.
        lines = message.splitlines() or [f"status {status}"]
        raise NftError(f"nftables refused: {lines[0]}")
    return output


def table_exists(family: str, table: str) -> bool:
    """Return whether the kernel has this table, without libnftables and without nf_tables."""
    answer = _ask(_GET_TABLE, family, netlink.attribute(_TABLE_NAME, table.encode() + b"\0"))
    if answer is None:
        return False
    kind, result = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    return not (kind == netlink.ERROR and result in (-errno.ENOENT, -errno.EOPNOTSUPP, -errno.EINVAL))


def ruleset_generation() -> int | None:
    """Return the kernel's count of changes to the namespace's rules; None if the kernel has no count."""
    answer = _ask(_GET_GENERATION, "unspec", b"")
    if answer is None or struct.unpack_from("=H", answer, 4)[0] != _GENERATION_ANSWER:
        return None
    found = netlink.attributes(answer, netlink.FIRST_ATTRIBUTE).get(_GENERATION_ID)
    return None if found is None else int.from_bytes(found, "big")


def _ask(what: int, family: str, attributes: bytes) -> bytes | None:
    try:
        with netlink.open_socket(netlink.NETFILTER, timeout=_TIMEOUT_SECONDS) as link:
            link.send(netlink.netfilter_message(what, 0, _FAMILIES[family], attributes))
            return link.recv(65536)
    except OSError:
        return None


def _is_low() -> bool:
    """Return whether the next descriptor fits select(2). With a higher one libnftables aborts."""
    with open("/dev/null", "rb") as next_one:  # noqa: PTH123 (pathlib costs the L4 daemon half a mebibyte)
        return next_one.fileno() < _FD_SETSIZE


@functools.cache
def _library() -> Any:
    """Return libnftables; None if it is not installed."""
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
    """Run commands in a new context, because a context belongs to the namespace in which it was created."""
    context = library.nft_ctx_new(0)
    if not context:
        raise NftError("libnftables returned no context")
    try:
        library.nft_ctx_buffer_output(context)
        library.nft_ctx_buffer_error(context)
        library.nft_ctx_output_set_flags(context, flags | _NUMERIC)
        status = library.nft_run_cmd_from_buffer(context, commands.encode())
        output, message = library.nft_ctx_get_output_buffer(context), library.nft_ctx_get_error_buffer(context)
        return status, (output or b"").decode(), (message or b"").decode()
    finally:
        library.nft_ctx_free(context)


def _by_command(commands: str, flags: int) -> tuple[int, str, str]:
    # Some hosts have the program nft, but not the library as a file of its own.
    import subprocess  # noqa: PLC0415 (needed only without libnftables)

    words = ["nft", "-n", *(["-s"] if flags & STATELESS else []), "-f", "-"]
    try:
        done = subprocess.run(
            words, input=commands, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NftError(f"nft cannot be run: {error}") from error
    return done.returncode, done.stdout, done.stderr
