# SPDX-License-Identifier: Apache-2.0
"""Network namespaces of this machine: create, run a function inside, remove.

Invariant: only a thread that was created for this purpose changes its namespace, and no function forks, because the
controller has many threads. (`NetNS` of pyroute2 forks a child for each socket; `os.setns` needs Python 3.12.) A
namespace has a name while it is mounted below ``/run/netns``.
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
from amphora_driver.host.detached_process import Process, find

T = TypeVar("T")

DIRECTORY = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 0x100000
_MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_making = threading.Lock()


def path(name: str) -> Path:
    """The mount point of a namespace."""
    return DIRECTORY / name


def exists(name: str) -> bool:
    """Whether the namespace exists; False for a file without a mount, which a crash may leave."""
    place = path(name)
    try:
        return place.stat().st_dev != DIRECTORY.stat().st_dev
    except FileNotFoundError:
        return False


def names(prefix: str) -> list[str]:
    """The names with this prefix, including incomplete namespaces."""
    if not DIRECTORY.is_dir():
        return []
    return sorted(entry.name for entry in DIRECTORY.iterdir() if entry.name.startswith(prefix))


def ensure(name: str) -> bool:
    """Create a namespace and set its loopback interface up; False if the namespace exists."""
    with _making:
        if exists(name):
            return False
        _make_mounts_shared()
        path(name).touch(mode=0o444)
        _in_thread(lambda: _create_and_mount(path(name)), f"create the network namespace {name}")
    return True


def remove(name: str) -> None:
    """Remove the name of a namespace; no error if it does not exist.

    The kernel removes the namespace itself after its last process has ended.
    """
    place = path(name)
    while exists(name):
        _check_result(_LIBC.umount2(os.fsencode(place), _MNT_DETACH), f"unmount {place}")
    # Amphorae may have copies of this mount in their mount namespaces. The kernel detaches these copies when the file
    # is deleted.
    place.unlink(missing_ok=True)


def processes(name: str) -> list[Process]:
    """All processes in a namespace."""
    if not exists(name):
        return []
    wanted = path(name).stat()
    return find(lambda entry: os.path.samestat((entry / "ns/net").stat(), wanted))


def run_inside(place: str | Path, work: Callable[[], T]) -> T:
    """Run a function in the namespace at this path (a mount point or a link); returns its result.

    Raises:
        FileNotFoundError: the path does not exist, or no namespace is mounted there yet.
    """
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)

    def enter() -> T:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            # setns(2) fails with EINVAL if the descriptor is no network namespace.
            if ctypes.get_errno() == errno.EINVAL:
                raise FileNotFoundError(errno.ENOENT, "no network namespace is mounted here", str(place))
            _check_result(-1, f"enter the network namespace {place}")
        return work()

    try:
        return _in_thread(enter, f"work in the network namespace {place}")
    finally:
        os.close(descriptor)


def run_with_netlink(place: str | Path, work: Callable[[Any], T]) -> T:
    """Run a function in a namespace, with a netlink socket of the namespace as its argument."""

    def with_socket() -> T:
        with IPRoute() as kernel:
            return work(kernel)

    return run_inside(place, with_socket)


def write_sysctl(name: str, value: int) -> None:
    """Set a sysctl in the namespace of this thread; no error if the kernel does not have it."""
    with suppress(FileNotFoundError):
        Path("/proc/sys", name).write_text(str(value), encoding="ascii")


def _create_and_mount(place: Path) -> None:
    _check_result(_LIBC.unshare(_CLONE_NEWNET), "create a network namespace")
    # Duplicate address detection is disabled, because it would delay the use of each IPv6 address by one or two
    # seconds.
    for scope in ("all", "default"):
        write_sysctl(f"net/ipv6/conf/{scope}/accept_dad", 0)
        write_sysctl(f"net/ipv6/conf/{scope}/accept_ra", 0)
    with IPRoute() as kernel:
        kernel.link("set", index=1, state="up")
    source = b"/proc/thread-self/ns/net"
    _check_result(_LIBC.mount(source, os.fsencode(place), b"none", ctypes.c_ulong(_MS_BIND), None), f"mount {place}")


def _make_mounts_shared() -> None:
    """Make the directory a shared mount, as iproute2 does: all mount namespaces then see each change."""
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
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
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
