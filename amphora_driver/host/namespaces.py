# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of this machine: made, entered for one function, removed.

Invariant: no thread but one made for the purpose ever leaves its namespace, and nothing here forks: threads of
a controller work beside each other. (pyroute2's own `NetNS` forks a child for each socket, `os.setns` is
newer than our oldest Python.) A namespace has a name exactly as long as it is mounted under ``/run/netns``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute

from amphora_driver.errors import NetworkError
from amphora_driver.host.detached_process import Process, identify

T = TypeVar("T")

DIRECTORY = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 0x100000
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_making = threading.Lock()


def path(name: str) -> Path:
    """Where the namespace of this name is mounted."""
    return DIRECTORY / name


def exists(name: str) -> bool:
    """Whether there is a namespace of this name; a mere file, left by a crash between two steps, is none."""
    place = path(name)
    try:
        return place.stat().st_dev != DIRECTORY.stat().st_dev
    except FileNotFoundError:
        return False


def names(prefix: str) -> list[str]:
    """The names that begin so, with those of unfinished or half removed namespaces."""
    if not DIRECTORY.is_dir():
        return []
    return sorted(entry.name for entry in DIRECTORY.iterdir() if entry.name.startswith(prefix))


def ensure(name: str) -> bool:
    """Make a namespace with its loopback up; False if it was there already."""
    with _making:
        if exists(name):
            return False
        _make_mounts_shared()
        path(name).touch(mode=0o444)
        _in_thread(lambda: _create_and_mount(path(name)), f"make the network namespace {name}")
    return True


def remove(name: str) -> None:
    """Take the name away: the namespace ends with the last process in it. No error if it is not there."""
    place = path(name)
    while exists(name):
        _check_result(_LIBC.umount2(os.fsencode(place), _MNT_DETACH), f"unmount {place}")
    # Unlinking also detaches the copies of the mount that other mount namespaces (amphorae) took with them.
    place.unlink(missing_ok=True)


def processes(name: str) -> list[Process]:
    """Every process in the namespace of this name."""
    if not exists(name):
        return []
    wanted = path(name).stat()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if os.path.samestat((entry / "ns/net").stat(), wanted):
                    found.append(identify(int(entry.name)))
    return [process for process in found if process is not None]


def run_inside(place: str | Path, work: Callable[[], T]) -> T:
    """Run a function in the namespace mounted at (or linked from) this path; returns its result.

    Raises:
        FileNotFoundError: there is no such namespace, or its file exists and nothing is mounted on it yet.
    """
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)

    def enter() -> T:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # setns(2): not a namespace of this kind
                raise FileNotFoundError(errno.ENOENT, "no network namespace is mounted here", str(place))
            _check_result(-1, f"enter the network namespace {place}")
        return work()

    try:
        return _in_thread(enter, f"work in the network namespace {place}")
    finally:
        os.close(descriptor)


def run_with_netlink(place: str | Path, work: Callable[[Any], T]) -> T:
    """`run_inside`, with a netlink socket of the namespace as the function's argument."""

    def with_socket() -> T:
        with IPRoute() as kernel:
            return work(kernel)

    return run_inside(place, with_socket)


def write_sysctl(name: str, value: int) -> None:
    """Set a kernel option of the namespace this thread is in; no error where the kernel does not know it."""
    with suppress(FileNotFoundError):
        Path("/proc/sys", name).write_text(str(value), encoding="ascii")


def _create_and_mount(place: Path) -> None:
    _check_result(_LIBC.unshare(_CLONE_NEWNET), "leave the present network namespace")
    # Duplicate address detection would keep every IPv6 address unusable for a second or two.
    for scope in ("all", "default"):
        write_sysctl(f"net/ipv6/conf/{scope}/accept_dad", 0)
        write_sysctl(f"net/ipv6/conf/{scope}/accept_ra", 0)
    with IPRoute() as kernel:
        kernel.link("set", index=1, state="up")
    source = b"/proc/thread-self/ns/net"
    _check_result(_LIBC.mount(source, os.fsencode(place), b"none", ctypes.c_ulong(_MS_BIND), None), f"mount {place}")


def _make_mounts_shared() -> None:
    """As iproute2 does: a shared mount, so that a namespace made or removed here is so for everybody."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    place = os.fsencode(DIRECTORY)
    shared = ctypes.c_ulong(_MS_SHARED | _MS_REC)
    if _LIBC.mount(b"", place, b"none", shared, None) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        _check_result(-1, f"share {DIRECTORY}")
    bind = ctypes.c_ulong(_MS_BIND | _MS_REC)
    _check_result(_LIBC.mount(place, place, b"none", bind, None), f"mount {DIRECTORY}")
    _check_result(_LIBC.mount(b"", place, b"none", shared, None), f"share {DIRECTORY}")


def _in_thread(work: Callable[[], T], wanted: str) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            errors.append(error)

    thread = threading.Thread(target=run, name=wanted, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _check_result(result: int, wanted: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        remedy = "Network namespaces need root." if number == errno.EPERM else ""
        raise NetworkError(wanted, os.strerror(number), remedy)
