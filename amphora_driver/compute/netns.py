# SPDX-License-Identifier: Apache-2.0
"""Amphorae as namespaces of this machine.

Invariant: all that is known of an amphora lies in its folder, which is the first thing made and the last removed;
every step in between finds what an earlier, interrupted attempt left. A mark in it says which deployment booted the
amphora: another one with the same directory leaves it alone. One process at a time works on an amphora (a lock on its
folder), many amphorae are worked on at once. An amphora survives the process that booted it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from amphora_driver.compute.agent_code import AgentCode
from amphora_driver.compute.interface import BootOrder, Machine, MachineState
from amphora_driver.compute.process import Process, end, find, spawn
from amphora_driver.deadline import least
from amphora_driver.errors import ComputeError
from amphora_driver.network import bridges, namespaces
from amphora_driver.network.bridges import Switch

if TYPE_CHECKING:
    from oslo_config import cfg

    from amphora_driver.network.interface import Port
    from amphora_driver.network.local import LocalNetwork

MANAGEMENT_INTERFACE = "eth0"
INNER_NAMESPACE = "run/netns/amphora-haproxy"
_ID = re.compile(r"[0-9a-f][0-9a-f-]{7,35}")
_KILL_SECONDS = 10.0
# Longest time for somebody else to be done with an amphora's folder, and pause between two looks, in seconds.
_LOCK_SECONDS, _LOCK_PAUSE = 60.0, 0.02
_LOG_TAIL = 400
# The file in an amphora's folder that holds the prefix of the deployment that booted it.
_MARK = "deployment"
# The file in it that says which code it was booted with.
_IMAGE = "image"


class NetnsCompute:
    """Boots amphorae beside itself.

    Args:
        conf: our options.
        network: where ports come from; the management port of an amphora is taken and given back here.
    """

    # One machine knows neither sizes nor zones; both are taken as names, so that flavors can be tried out on it.
    supports: ClassVar[frozenset[str]] = frozenset({"compute_flavor", "compute_zone"})
    wiring: ClassVar[str] = "bridge"

    def __init__(self, conf: cfg.ConfigOpts, network: LocalNetwork) -> None:
        options = conf.compute_netns
        self._network = network
        self._directory = Path(options.directory).absolute()
        self._prefix: str = options.prefix
        self._python: str = options.agent_python
        self._management: str = options.management_network
        self._code = AgentCode(self._python)
        self._switch = Switch(conf.network_local.switch, options.management_network)

    # --- the backend's interface ---------------------------------------------------------------------------

    def boot(self, order: BootOrder) -> Machine:
        """Boot the amphora, or find the one already booted under this id."""
        with (
            self._folder(order.amphora_id, make=True) as folder,
            _explained(f"boot amphora {order.amphora_id}"),
        ):
            machine = self._machine(order.amphora_id)
            if machine is not None and machine.state is MachineState.RUNNING:
                return machine
            # Before anything else is made: what an interrupted boot leaves is ours.
            _write(folder / _MARK, self._prefix.encode())
            address = self._prepare_network(order.amphora_id)
            _write_files(folder, order, address)
            image = self.image(order.image_tag)
            _write(folder / _IMAGE, (image or "").encode())
            self._start(order.amphora_id, folder)
            return Machine(
                compute_id=self.namespace(order.amphora_id),
                state=MachineState.RUNNING,
                management_address=address,
                image=image,
            )

    def image(self, tag: str | None) -> str | None:  # noqa: ARG002 - one machine has no images to choose from
        """The digest of the agent's code: a machine that is booted now runs that."""
        with _explained("look at the agent's code"):
            return self._code.digest()

    def machines(self) -> frozenset[str]:
        """The ids of all amphorae of this deployment of which something is left."""
        with _explained("list amphorae"):
            return frozenset(one for one in self.booted() if self._is_ours(self._path(one)))

    def get(self, amphora_id: str) -> Machine | None:
        """The amphora's machine, or None if there is none."""
        with _explained(f"look up amphora {amphora_id}"):
            return self._machine(amphora_id)

    def attach(self, amphora_id: str, port: Port) -> None:
        """Give the machine an interface with the port's MAC address, joined to the port's network."""
        wanted = f"attach port {port.id} to amphora {amphora_id}"
        with self._folder(amphora_id) as folder, _explained(wanted):
            process = self._process(amphora_id) if folder.is_dir() else None
            if process is None or not process.alive():
                raise ComputeError(wanted, "the amphora does not run")
            if self._has_interface(amphora_id, process, port.mac):
                return
            self._connect(amphora_id, port)

    def detach(self, amphora_id: str, port: Port) -> None:
        """Take that interface away again; no error if it is not there."""
        with self._folder(amphora_id), _explained(f"detach port {port.id} from amphora {amphora_id}"):
            self._switch.disconnect(port.id)

    def destroy(self, amphora_id: str) -> None:
        """Stop the machine and remove all that `boot` made; no error if nothing is there."""
        with self._folder(amphora_id) as folder, _explained(f"destroy amphora {amphora_id}"):
            self._vanish(amphora_id)
            for port in self._network.ports(amphora_id):
                if port.network_id == self._management:
                    self._network.delete_port(port.id)
            if folder.is_dir():
                _remove(folder)

    # --- what the sandbox and tests ask besides ------------------------------------------------------------

    def power_off(self, amphora_id: str) -> None:
        """Stop the machine and remove its namespaces; its files and ports stay for `power_on`."""
        with self._folder(amphora_id), _explained(f"power amphora {amphora_id} off"):
            self._vanish(amphora_id)

    def power_on(self, amphora_id: str) -> bool:
        """Start a machine that was booted before and does not run, with all its ports; False if there was no need."""
        with self._folder(amphora_id) as folder, _explained(f"power amphora {amphora_id} on"):
            machine = self._machine(amphora_id)
            # Without its specification its boot never came to the end: whoever began it boots it again.
            if machine is None or machine.state is MachineState.RUNNING or not (folder / "spec.json").exists():
                return False
            self._prepare_network(amphora_id)
            self._start(amphora_id, folder)
            for port in self._network.ports(amphora_id):
                if port.network_id != self._management:
                    self._connect(amphora_id, port)
            return True

    def namespace(self, amphora_id: str) -> str:
        """The name of the amphora's management namespace."""
        return f"{self._prefix}-{amphora_id[:13]}"

    def booted(self) -> list[str]:
        """The ids of all amphorae that have a folder, running or not, whoever's they are."""
        if not self._directory.is_dir():
            return []
        return sorted(entry.name for entry in self._directory.iterdir() if _ID.fullmatch(entry.name))

    # --- steps ---------------------------------------------------------------------------------------------

    def _machine(self, amphora_id: str) -> Machine | None:
        folder = self._path(amphora_id)
        if not folder.is_dir():
            return None
        name = self.namespace(amphora_id)
        process = self._process(amphora_id)
        if process is None:
            reason = "its boot was interrupted; boot it again"
            return Machine(compute_id=name, state=MachineState.BUILDING, reason=reason)
        address = self._address(amphora_id)
        if process.alive() and address is not None:
            image = _image_of(folder)
            return Machine(compute_id=name, state=MachineState.RUNNING, management_address=address, image=image)
        reason = f"it ended: {_last_words(folder)}"
        return Machine(compute_id=name, state=MachineState.FAILED, management_address=address, reason=reason)

    def _address(self, amphora_id: str) -> str | None:
        ports = [port for port in self._network.ports(amphora_id) if port.network_id == self._management]
        return ports[0].addresses[0].address if ports and ports[0].addresses else None

    def _prepare_network(self, amphora_id: str) -> str:
        subnets = self._network.subnets(self._management)
        segment = self._segment(self._management, f"boot amphora {amphora_id}")
        port = self._network.ensure_port(amphora_id, self._management, [subnet.id for subnet in subnets])
        place = self._place(amphora_id)
        namespaces.ensure(self.namespace(amphora_id))
        if not bridges.has_mac(place, port.mac):
            self._switch.disconnect(port.id)
        self._switch.connect(port, segment, amphora_id, place, MANAGEMENT_INTERFACE)
        bridges.configure(place, MANAGEMENT_INTERFACE, port, subnets)
        return port.addresses[0].address

    def _segment(self, network_id: str, wanted: str) -> Any:
        for segment in self._network.networks():
            if segment.id == network_id:
                return segment
        remedy = "See [compute_netns] management_network."
        raise ComputeError(wanted, f"network {network_id} does not exist", remedy, final=True)

    def _start(self, amphora_id: str, folder: Path) -> None:
        spec = folder / "spec.json"
        parts = {
            "hostname": f"amphora-{amphora_id}",
            "etc": str(folder / "etc"),
            "var": str(folder / "var"),
            "python": self._python,
        }
        _write(spec, msgspec.json.encode(parts))
        argv = [
            *("nsenter", f"--net={self._place(amphora_id)}", "--"),
            *("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--uts", "--ipc"),
            *("--propagation", "private", "--mount-proc", "--wd=/", "--"),
            *(self._python, "-m", "amphora_agent.supervisor", str(spec)),
        ]
        names = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        process = spawn(argv, {**environment, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}, folder / "console.log")
        _write(folder / "process.json", msgspec.json.encode(process))

    def _process(self, amphora_id: str) -> Process | None:
        """The outermost process, from its record or, where the record was never written, by its arguments."""
        folder = self._path(amphora_id)
        try:
            return msgspec.json.decode((folder / "process.json").read_bytes(), type=Process)
        except FileNotFoundError:
            # The outermost was started before its child. Whoever boots this amphora just now writes the
            # record soon.
            found = sorted(find(str(folder / "spec.json")), key=lambda process: process.started)
            return found[0] if found else None

    def _stop(self, amphora_id: str) -> None:
        process = self._process(amphora_id)
        # The first process of a process-id namespace takes all others with it, and is gone only after them.
        known = [] if process is None else [*process.children(), process]
        # Started a moment ago, the outermost may have no child yet, or one that does not follow it into death yet.
        if not end(known, signal.SIGKILL, least(_KILL_SECONDS)) or not end(
            namespaces.processes(self.namespace(amphora_id)), signal.SIGKILL, least(_KILL_SECONDS)
        ):
            raise ComputeError(f"stop amphora {amphora_id}", "one of its processes does not end")
        (self._path(amphora_id) / "process.json").unlink(missing_ok=True)

    def _vanish(self, amphora_id: str) -> None:
        self._stop(amphora_id)
        self._switch.disconnect_owner(amphora_id)
        namespaces.remove(self.namespace(amphora_id))

    def _connect(self, amphora_id: str, port: Port) -> None:
        # What is left of the cable of an earlier life of this amphora may take some milliseconds to go.
        self._switch.disconnect(port.id)
        segment = self._segment(port.network_id, f"connect port {port.id}")
        self._switch.connect(port, segment, amphora_id, self._place(amphora_id), None)

    def _has_interface(self, amphora_id: str, process: Process, mac: str) -> bool:
        """Whether it is there, still outside or (the agent moves it in this direction only) inside."""
        if bridges.has_mac(self._place(amphora_id), mac):
            return True
        return any(bridges.has_mac(f"/proc/{child.pid}/root/{INNER_NAMESPACE}", mac) for child in process.children())

    # --- folders -------------------------------------------------------------------------------------------

    def _place(self, amphora_id: str) -> Path:
        return namespaces.path(self.namespace(amphora_id))

    def _path(self, amphora_id: str) -> Path:
        if not _ID.fullmatch(amphora_id):
            raise ComputeError(f"find the folder of amphora {amphora_id!r}", "this is not the id of an amphora")
        return self._directory / amphora_id

    def _is_ours(self, folder: Path) -> bool:
        with suppress(FileNotFoundError):
            return (folder / _MARK).read_bytes() == self._prefix.encode()
        return False

    @contextmanager
    def _folder(self, amphora_id: str, *, make: bool = False) -> Iterator[Path]:
        """The amphora's folder, locked for this thread alone; where there is none, there is no lock."""
        folder = self._path(amphora_id)
        descriptor = _lock(folder, make=make)
        try:
            yield folder
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _lock(folder: Path, *, make: bool) -> int | None:
    while True:
        if make:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                continue
            return None
        try:
            _take(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        # Whoever had the lock before may have removed the folder: then this is the lock of nothing.
        if folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    """Lock it for this thread, as soon as nobody else has it and in the time this operation has."""
    end_at = time.monotonic() + _LOCK_SECONDS
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > end_at:
            raise ComputeError(f"work on {folder}", f"somebody else has been at it for {_LOCK_SECONDS:g} s")
        time.sleep(least(_LOCK_PAUSE))


def _write_files(folder: Path, order: BootOrder, address: str) -> None:
    etc = folder / "etc"
    for place in (etc, folder / "var"):
        place.mkdir(mode=0o700, exist_ok=True)
    for name, content in order.files.items():
        text = content.reveal()
        if name == "agent.conf":
            text = text.replace(b"{management_address}", address.encode())
        if Path(name).name != name:
            raise ComputeError(f"boot amphora {order.amphora_id}", f"{name} is not the name of a file", final=True)
        _write(etc / name, text)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and readable by root only: there are keys among these files."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)


def _remove(folder: Path) -> None:
    """Remove it, and its mark last: what is left of it when this is interrupted is still ours."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != _MARK:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder)


def _image_of(folder: Path) -> str | None:
    """What it was booted from, if that was written down."""
    with suppress(FileNotFoundError):
        return (folder / _IMAGE).read_text(encoding="ascii") or None
    return None


def _last_words(folder: Path) -> str:
    try:
        text = (folder / "console.log").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return text[-_LOG_TAIL:] or "it said nothing"


@contextmanager
def _explained(wanted: str) -> Iterator[None]:
    """Say of an error of the operating system what it kept from happening."""
    try:
        yield
    except OSError as error:
        raise ComputeError(wanted, str(error)) from error
