# SPDX-License-Identifier: Apache-2.0
"""The reader of the config drive, which Nova attaches to a virtual machine.

Invariant: the drive is untrusted; nothing on it is executed. The program reads regular files of bounded size and
follows no link. It writes only files of mode 0600 in /etc/amphora-agent (a file system in memory), networkd's file for
the management interface, and the time servers. Existing files stay: a second run does not revert a renewed certificate.
The files come from ``files`` of ``meta_data.json`` and from a JSON document in ``user_data``, with the same limits. The
program uses the standard library only:

    python3 -I -S config_drive.py

Source: OpenStack's config drive (Nova, "Metadata"); ECMA-119 8.4 and Microsoft's FAT specification for the labels.
"""

from __future__ import annotations

import configparser
import ctypes
import json
import os
import re
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Python's option -I removes the directory of the agent's package from the search path, so the next line adds the
# directory again.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from amphora_agent import cloud_network
from amphora_agent.errors import AgentError, SettingsError
from amphora_agent.paths import write_atomically

LABEL = "config-2"
LATEST = "openstack/latest"
WAIT_SECONDS = 120.0
MOST_FILES, LARGEST_FILE, LARGEST_DOCUMENT = 64, 256 * 1024, 1024 * 1024
_HEADER_BYTES = 34 * 1024
_LOOK_SECONDS = 1.0
_CLOCK_SECONDS = 2.0
_FOLDER = "/etc/amphora-agent"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*")
_PUBLIC_KEY = re.compile(r"(ssh|ecdsa|sk-ssh|sk-ecdsa)-[ -~]{16,8192}")
_KEYS = "authorized_keys"
# Key under which the user data contain the agent's files. `amphora_driver/compute/config_drive.py` writes the user data
# as a JSON document.
USER_DATA_KEY = "amphora_files"
# Flags of mount(2): MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC and MS_NOSYMFOLLOW.
_MOUNT_FLAGS = 1 | 2 | 4 | 8 | 256
_KOBJECT_UEVENT = 15


class Places:
    """The paths that the program uses; a test moves them."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.files = root / "etc/amphora-agent"
        self.network = root / "run/systemd/network/10-management.network"
        self.time_servers = root / "run/amphora-chrony/config-drive.sources"
        self.command_line = root / "proc/cmdline"
        self.blocks = root / "sys/class/block"
        self.devices = root / "dev"


@dataclass(frozen=True)
class DriveContent:
    """The content of the drive.

    ``skipped`` are the paths of files outside /etc/amphora-agent. ``other_user_data`` means that the user data are not
    a document of boot files.
    """

    hostname: str | None
    files: Mapping[str, bytes]
    skipped: tuple[str, ...]
    network: Mapping[str, Any]
    other_user_data: bool = False


def label(header: bytes) -> tuple[str, str] | None:
    """Return file system and label from the first 34 KiB of a device; None for another file system."""
    descriptor = header[32768:32840]
    if descriptor[:6] == b"\x01CD001":
        return "iso9660", descriptor[40:72].decode("ascii", "replace").strip()
    if header[510:512] == b"\x55\xaa":
        # The type and the label have other offsets in FAT32 than in FAT12 and FAT16, so the loop tries both pairs of
        # offsets.
        for kind, name in ((82, 71), (54, 43)):
            if header[kind : kind + 3] == b"FAT":
                return "vfat", header[name : name + 11].decode("ascii", "replace").strip()
    return None


def find(places: Places, seconds: float) -> tuple[Path, str]:
    """Wait up to `seconds` for the drive; return its device and file system. Raises SettingsError."""
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _KOBJECT_UEVENT) as events:
        # The program subscribes to events before the first search. Otherwise, the program would miss a drive that
        # appears between the search and the subscription.
        events.bind((0, 1))
        first = True
        while True:
            found = _look(places)
            if found is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise SettingsError(
                    "find the config drive",
                    f"no device has the label {LABEL} within {seconds:g} s",
                    "Boot this image with a config drive (nova boot --config-drive true).",
                )
            if first:
                _log("the virtual machine is waiting for the config drive, which contains its settings")
                first = False
            events.settimeout(min(left, _LOOK_SECONDS))
            with suppress(OSError):
                # The program searches for the drive again after an event of the kernel, and also after a time-out or a
                # lost event.
                events.recv(65536)


def _look(places: Places) -> tuple[Path, str] | None:
    for entry in sorted(places.blocks.iterdir()) if places.blocks.is_dir() else ():
        with suppress(OSError), (places.devices / entry.name).open("rb", buffering=0) as device:
            found = label(device.read(_HEADER_BYTES))
            if found is not None and found[1].lower() == LABEL:
                return places.devices / entry.name, found[0]
    return None


@contextmanager
def mounted(device: Path, kind: str) -> Iterator[int]:
    """Mount the drive; yield a descriptor of its root directory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(prefix="config-drive-", dir="/run") as place:
        result = libc.mount(os.fsencode(device), place.encode(), kind.encode(), ctypes.c_ulong(_MOUNT_FLAGS), None)
        if result != 0:
            raise SettingsError(f"mount {device} as {kind}", os.strerror(ctypes.get_errno()))
        try:
            root = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield root
            finally:
                os.close(root)
        finally:
            libc.umount2(place.encode(), 0)


def read(root: int) -> DriveContent:
    """Read and check the documents and files below the descriptor of a directory.

    Raises SettingsError if this is no config drive, or a document is invalid.
    """
    meta = _document(root, "meta_data.json")
    network = _optional(root, "network_data.json")
    files, skipped = _injected_files(root, meta)
    user_data = _user_data_files(root)
    for name, data in (user_data or {}).items():
        if _agent_file(f"{_FOLDER}/{name}") is None:
            skipped.append(f"user_data: {name[:200]}")
        elif name in files:
            # If both documents contain the same file name, the contents may differ, and the program cannot know the
            # right content. So the program refuses the drive.
            raise SettingsError("read the files of the config drive", f"{name} is in meta_data.json and in user_data")
        else:
            files[name] = data
    if len(files) > MOST_FILES:
        raise SettingsError("read the files of the config drive", f"the drive has more than {MOST_FILES} files")
    keys = _public_keys(meta.get("public_keys"))
    if keys:
        files[_KEYS] = keys
    return DriveContent(_hostname(meta), files, tuple(skipped), network, other_user_data=user_data is None)


def _injected_files(root: int, meta: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that ``files`` of meta_data.json lists, and the paths outside /etc/amphora-agent."""
    files: dict[str, bytes] = {}
    skipped = []
    listed = meta.get("files") or []
    if not isinstance(listed, list) or len(listed) > MOST_FILES:
        raise SettingsError("read meta_data.json", f"files is not a list of at most {MOST_FILES}")
    for one in listed:
        if not isinstance(one, dict) or not all(isinstance(one.get(key), str) for key in ("path", "content_path")):
            raise SettingsError("read meta_data.json", "one of its files has no path or no content_path")
        name = _agent_file(one["path"])
        if name is None:
            skipped.append(one["path"][:200])
        else:
            files[name] = content(root, f"openstack/{one['content_path'].lstrip('/')}", LARGEST_FILE)
    return files, skipped


def _user_data_files(root: int) -> dict[str, bytes] | None:
    """Return the files of the document in the user data; None if the user data are something else."""
    wanted = "read the files of user_data"
    try:
        text = content(root, f"{LATEST}/user_data", LARGEST_DOCUMENT)
    except SettingsError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        return {}
    if not text.strip():
        return {}
    document = _parse_user_data(text)
    if document is None:
        return None
    listed = document[USER_DATA_KEY]
    if not isinstance(listed, dict) or len(listed) > MOST_FILES:
        raise SettingsError(wanted, f"{USER_DATA_KEY} is not an object of at most {MOST_FILES} files")
    if not all(isinstance(data, str) for data in listed.values()):
        raise SettingsError(wanted, "the content of a file is not a text")
    try:
        files = {name: data.encode() for name, data in listed.items()}
    except UnicodeEncodeError:
        # `from None` drops the encoder's error, which contains the text of the file, perhaps a private key.
        raise SettingsError(wanted, "the content of a file is not Unicode") from None
    for name, data in files.items():
        if len(data) > LARGEST_FILE:
            raise SettingsError(wanted, f"{name[:200]!r} has more than {LARGEST_FILE} bytes")
    return files


def _parse_user_data(text: bytes) -> dict[str, Any] | None:
    """Return the document of boot files; None if the text is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and USER_DATA_KEY in found else None


def _optional(root: int, name: str) -> dict[str, Any]:
    try:
        return _document(root, name)
    except SettingsError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        return {}


def content(root: int, path: str, largest: int) -> bytes:
    """Return the content of a file below a descriptor. Links in the path are refused.

    Raises SettingsError if the file does not exist, is no regular file, or has more than `largest` bytes.
    """
    parts = path.split("/")
    wanted = f"read {path[:200]!r} of the config drive"
    if not all(parts) or any(part in {".", ".."} or "\0" in part for part in parts):
        raise SettingsError(wanted, "the path is not valid")
    directory = os.dup(root)
    try:
        for part in parts[:-1]:
            inside = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inside
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SettingsError(wanted, "it is not a file")
            data = file.read(largest + 1)
    except OSError as error:
        raise SettingsError(wanted, error.strerror or str(error)) from error
    finally:
        os.close(directory)
    if len(data) > largest:
        raise SettingsError(wanted, f"it has more than {largest} bytes")
    return data


def _document(root: int, name: str) -> dict[str, Any]:
    text = content(root, f"{LATEST}/{name}", LARGEST_DOCUMENT)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        # `from None` drops the parser's error, which would quote a document that may contain keys.
        raise SettingsError(f"read {name}", f"it is not JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise SettingsError(f"read {name}", "it is not an object")
    return found


def _agent_file(path: str) -> str | None:
    folder, _, name = path.rpartition("/")
    return name if folder == _FOLDER and name != _KEYS and _NAME.fullmatch(name) else None


def _public_keys(found: object) -> bytes:
    keys = found.values() if isinstance(found, dict) else ()
    lines = [key.strip() for key in keys if isinstance(key, str) and _PUBLIC_KEY.fullmatch(key.strip())]
    return "".join(f"{line}\n" for line in lines[:MOST_FILES]).encode()


def _hostname(meta: Mapping[str, Any]) -> str | None:
    name = meta.get("hostname") or meta.get("name")
    return name if isinstance(name, str) and len(name) <= 64 and _HOSTNAME.fullmatch(name) else None


def write_files(places: Places, told: DriveContent) -> None:
    """Write the missing files, agent.conf last, then the network. Raises SettingsError and OSError."""
    places.files.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in sorted(told.files, key=lambda name: name == "agent.conf"):
        _write_new(places.files / name, told.files[name])
    interface = cloud_network.management(told.network, _bind_address(told.files.get("agent.conf", b"")))
    _write(places.network, cloud_network.FALLBACK if interface is None else cloud_network.rendered(interface))
    servers = cloud_network.time_servers(told.network)
    if servers:
        _write(places.time_servers, "".join(f"server {address} iburst\n" for address in servers))


def _bind_address(settings: bytes) -> str | None:
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(ValueError, configparser.Error):
        parser.read_string(settings.decode())
        return parser.get("agent", "bind_address")
    return None


def _write_new(path: Path, data: bytes) -> None:
    """Write a file of mode 0600 completely, unless it exists."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()


def _write(path: Path, text: str) -> None:
    """Write a file that all users can read: networkd and chrony do not run as root."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomically(path, text, durable=False, mode=0o644)


def set_clock() -> None:
    """Set the time from the hardware clock: after a resume the system clock has the time of the snapshot."""
    with suppress(OSError, ValueError):
        now = float(Path("/sys/class/rtc/rtc0/since_epoch").read_text(encoding="ascii"))
        if abs(now - time.time()) > _CLOCK_SECONDS:
            time.clock_settime(time.CLOCK_REALTIME, now)


def wait_seconds(command_line: str) -> float:
    """Return the time-out for the drive in seconds, from ``amphora.wait=`` of the kernel's command line."""
    for word in command_line.split():
        name, _, value = word.partition("=")
        if name == "amphora.wait":
            with suppress(ValueError):
                return float(value)
    return WAIT_SECONDS


def _log(line: str) -> None:
    sys.stdout.write(f"amphora: {line}\n")
    sys.stdout.flush()


def main() -> None:
    """Read the drive and write the files."""
    places = Places()
    try:
        device, kind = find(places, wait_seconds(places.command_line.read_text(encoding="ascii", errors="replace")))
        set_clock()
        with mounted(device, kind) as root:
            told = read(root)
        if told.hostname is not None:
            socket.sethostname(told.hostname)
        write_files(places, told)
    except (AgentError, OSError) as error:
        # Without a readable config drive, the amphora gets no address. The fallback network lets an operator log in
        # with ssh.
        if not places.network.exists():
            _write(places.network, cloud_network.FALLBACK)
        sys.exit(f"amphora: {error}")
    for path in told.skipped:
        _log(f"the config drive has the file {path!r}, which is ignored: it is not a permitted file of {_FOLDER}")
    if told.other_user_data:
        _log("the user data of the virtual machine are ignored, because they are not a document of boot files")
    _log(f"the boot program copied {len(told.files)} files from the config drive {device.name} to {places.files}")


if __name__ == "__main__":
    main()
