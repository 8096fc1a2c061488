# SPDX-License-Identifier: Apache-2.0
"""What distinguishes one sandbox from another, and where its files are.

Invariant: everything a sandbox leaves behind lies below its state directory, and everything it runs carries its prefix:
several sandboxes live side by side. The choices are made once, at the first start, and written down.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import msgspec

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.host import namespaces

OCTAVIA_PORT = 9876
NETWORK_PORT = 9696
STATUS_PORT = 9878
# sun_path is 108 bytes; the longest name below the state directory is a doorbell's.
_LONGEST_STATE = 107 - len("/run/bells/controller-4194304-7fffffffffff")


class SandboxError(AmphoraDriverError):
    """The one-machine stack could not be started or ended."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox."""

    state: str
    prefix: str
    octavia_port: int
    network_port: int
    agent_python: str
    # SQLAlchemy URLs of databases elsewhere; files of the state directory without.
    store_url: str | None = None
    octavia_url: str | None = None
    # Celery's broker; without it hints stay on this machine.
    broker_url: str | None = None
    # Where the status page is found from outside; 0 for nowhere.
    status_port: int = 0
    # Compute backend of its amphorae, and for qemu the folder of their images.
    compute: str = "netns"
    images: str | None = None
    # Options of the provider, by group, beside or instead of the sandbox's own.
    options: dict[str, dict[str, str]] = {}

    @property
    def etc(self) -> Path:
        """Configuration, keys and certificates."""
        return Path(self.state, "etc")

    @property
    def data(self) -> Path:
        """Databases."""
        return Path(self.state, "data")

    @property
    def run(self) -> Path:
        """Sockets and what is known of processes."""
        return Path(self.state, "run")

    @property
    def log(self) -> Path:
        """One file for each program."""
        return Path(self.state, "log")

    @property
    def amphorae(self) -> Path:
        """One folder for each amphora."""
        return Path(self.state, "amphorae")

    @property
    def machines(self) -> Path:
        """The same where they are virtual machines."""
        return Path(self.state, "machines")

    @property
    def tls(self) -> Path:
        """Octavia's local certificates: NAME.crt and NAME.key make the reference NAME."""
        return Path(self.state, "tls")

    @property
    def driver_configuration(self) -> Path:
        """Options of the provider."""
        return self.etc / "amphora-driver.conf"

    @property
    def octavia_configuration(self) -> Path:
        """Options of Octavia."""
        return self.etc / "octavia.conf"

    @property
    def clouds(self) -> Path:
        """What clients need to find Octavia; the cloud is called sandbox."""
        return self.etc / "clouds.yaml"

    @property
    def env(self) -> Path:
        """The same for a shell, to be sourced."""
        return Path(self.state, "env")

    @property
    def octavia_database_url(self) -> str:
        """Octavia's own database."""
        return self.octavia_url or f"sqlite:///{self.data / 'octavia.sqlite'}"

    @property
    def database_url(self) -> str:
        """The provider's database."""
        return self.store_url or f"sqlite:///{self.data / 'amphora-driver.sqlite'}"

    @property
    def endpoint(self) -> str:
        """Octavia's API."""
        return f"http://127.0.0.1:{self.octavia_port}"

    @property
    def status_page(self) -> str:
        """The controller's status page."""
        return f"http://127.0.0.1:{self.status_port}/"

    @property
    def network_endpoint(self) -> str:
        """The network API."""
        return f"http://127.0.0.1:{self.network_port}"

    @property
    def switch(self) -> str:
        """The namespace of the bridges."""
        return f"{self.prefix}-switch"

    @property
    def control(self) -> str:
        """The namespace of controller and health manager."""
        return f"{self.prefix}-control"

    @property
    def wait_timeout(self) -> float:
        """Seconds within which something that was asked of Octavia has come to an end, good or bad."""
        return 1200.0 if self.compute == "qemu" else 120.0

    def host(self, name: str) -> str:
        """The namespace of a client or member."""
        return f"{self.prefix}-{name}"

    def environment(self) -> dict[str, str]:
        """What clients and programs find their way with."""
        return {
            "AMPHORA_DRIVER_CONFIG": str(self.driver_configuration),
            "OS_CLIENT_CONFIG_FILE": str(self.clouds),
            "OS_CLOUD": "sandbox",
        }


def load_settings(state: Path) -> Settings | None:
    """The sandbox with this state directory, if it was ever started."""
    try:
        return msgspec.json.decode(_file(state).read_bytes(), type=Settings)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SandboxError(f"read {_file(state)}", str(error), "Remove the state directory to start afresh.") from error


def load_or_create_settings(
    state: Path,
    prefix: str | None = None,
    agent_python: str | None = None,
    *,
    store_url: str | None = None,
    octavia_url: str | None = None,
    broker_url: str | None = None,
    compute: str | None = None,
    images: str | None = None,
    options: dict[str, dict[str, str]] | None = None,
) -> Settings:
    """The sandbox with this state directory, its choices made now if it was never started."""
    known = load_settings(state)
    if known is not None:
        if compute not in {None, known.compute}:
            raise SandboxError(
                f"use {compute} in {state}",
                f"this sandbox was begun with {known.compute}",
                "Remove the state directory to start afresh.",
            )
        return known
    if len(str(state)) > _LONGEST_STATE:
        raise SandboxError(
            f"use {state}",
            "unix sockets below it would have too long a path",
            f"Choose a directory with at most {_LONGEST_STATE} characters.",
        )
    settings = Settings(
        state=str(state),
        prefix=prefix or _free_prefix(),
        octavia_port=_free_port(OCTAVIA_PORT),
        network_port=_free_port(NETWORK_PORT),
        status_port=_free_port(STATUS_PORT),
        # Amphorae are started elsewhere. A link stays one: it is what makes an environment of it.
        agent_python=str(Path(agent_python or sys.executable).absolute()),
        store_url=store_url,
        octavia_url=octavia_url,
        broker_url=broker_url,
        compute=compute or "netns",
        images=images,
        options=options or {},
    )
    state.mkdir(parents=True, exist_ok=True, mode=0o755)
    # URLs have passwords in them.
    _file(state).touch(mode=0o600)
    _file(state).write_bytes(msgspec.json.format(msgspec.json.encode(settings)))
    return settings


def _file(state: Path) -> Path:
    return state / "sandbox.json"


def _free_prefix() -> str:
    taken = {name.partition("-")[0] for name in namespaces.names("")}
    return next(name for name in ("amp", *(f"amp{number}" for number in range(2, 100))) if name not in taken)


def _free_port(preferred: int) -> int:
    """The usual port, or any other when somebody has it."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise SandboxError("find a port", "every port of 127.0.0.1 is in use")
