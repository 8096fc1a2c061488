# SPDX-License-Identifier: Apache-2.0
"""The settings of a sandbox and the paths of its files.

Invariant: all files of a sandbox are in its state directory, and all its namespaces have its prefix. Several sandboxes
can run at the same time. The first start chooses and stores the settings.
"""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.host import namespaces

OCTAVIA_PORT = 9876
NETWORK_PORT = 9696
STATUS_PORT = 9878
_START_AGAIN = "Remove the state directory to create a new sandbox."
# The kernel permits 107 bytes in the path of a Unix socket. A controller's socket has the longest path below the state
# directory.
_LONGEST_STATE = 107 - len("/run/sockets/controller-4194304-7fffffffffff")


class SandboxError(AmphoraDriverError):
    """The sandbox could not be started or stopped."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one sandbox.

    Attributes:
        store_url, octavia_url: URLs of external databases; None for SQLite files in the state directory.
        broker_url: URL of Celery's broker; None for local sockets.
        status_port: port of the status page on 127.0.0.1; 0 for none.
        compute: compute backend of the amphorae.
        images: directory of images for qemu.
        options: options of the provider by group; they override those of the sandbox.
        octavia_options: the same for Octavia.
    """

    state: str
    prefix: str
    octavia_port: int
    network_port: int
    agent_python: str
    store_url: str | None = None
    octavia_url: str | None = None
    broker_url: str | None = None
    status_port: int = 0
    compute: str = "netns"
    images: str | None = None
    options: dict[str, dict[str, str]] = {}
    octavia_options: dict[str, dict[str, str]] = {}

    @property
    def etc(self) -> Path:
        return Path(self.state, "etc")

    @property
    def data(self) -> Path:
        return Path(self.state, "data")

    @property
    def run(self) -> Path:
        """Directory of sockets and process files."""
        return Path(self.state, "run")

    @property
    def log(self) -> Path:
        return Path(self.state, "log")

    @property
    def amphorae(self) -> Path:
        """Directory of the `netns` amphorae."""
        return Path(self.state, "amphorae")

    @property
    def machines(self) -> Path:
        """Directory of the `qemu` amphorae."""
        return Path(self.state, "machines")

    @property
    def tls(self) -> Path:
        """Certificates for Octavia: NAME.crt and NAME.key belong to the reference NAME."""
        return Path(self.state, "tls")

    @property
    def driver_configuration(self) -> Path:
        return self.etc / "amphora-driver.conf"

    @property
    def octavia_configuration(self) -> Path:
        return self.etc / "octavia.conf"

    @property
    def clouds(self) -> Path:
        """The clouds.yaml for clients; the name of the cloud is `sandbox`."""
        return self.etc / "clouds.yaml"

    @property
    def env(self) -> Path:
        """A shell script that sets the environment of clients."""
        return Path(self.state, "env")

    @property
    def octavia_database_url(self) -> str:
        return self.octavia_url or f"sqlite:///{self.data / 'octavia.sqlite'}"

    @property
    def database_url(self) -> str:
        return self.store_url or f"sqlite:///{self.data / 'amphora-driver.sqlite'}"

    @property
    def endpoint(self) -> str:
        """The URL of Octavia's API."""
        return f"http://127.0.0.1:{self.octavia_port}"

    @property
    def status_page(self) -> str:
        return f"http://127.0.0.1:{self.status_port}/"

    @property
    def network_endpoint(self) -> str:
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
        """Time-out in seconds for an operation in Octavia."""
        return 1200.0 if self.compute == "qemu" else 120.0

    def host(self, name: str) -> str:
        """The namespace of a client or member."""
        return f"{self.prefix}-{name}"

    def environment(self) -> dict[str, str]:
        return {
            "AMPHORA_DRIVER_CONFIG": str(self.driver_configuration),
            "OS_CLIENT_CONFIG_FILE": str(self.clouds),
            "OS_CLOUD": "sandbox",
        }


def load_settings(state: Path) -> Settings | None:
    """The stored settings of the sandbox in this directory; None if it was never started."""
    try:
        return msgspec.json.decode(_file(state).read_bytes(), type=Settings)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise SandboxError(f"read {_file(state)}", str(error), _START_AGAIN) from error


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
    octavia_options: dict[str, dict[str, str]] | None = None,
) -> Settings:
    """The stored settings of the sandbox; at its first start, new settings from the arguments."""
    known = load_settings(state)
    if known is not None:
        if compute not in {None, known.compute}:
            happened = f"this sandbox was created with {known.compute}"
            raise SandboxError(f"use {compute} in {state}", happened, _START_AGAIN)
        return known
    if len(str(state)) > _LONGEST_STATE:
        remedy = f"Choose a directory with at most {_LONGEST_STATE} characters."
        raise SandboxError(f"use {state}", "the paths of unix sockets below it are too long", remedy)
    settings = Settings(
        state=str(state),
        prefix=prefix or _free_prefix(),
        octavia_port=_free_port(OCTAVIA_PORT),
        network_port=_free_port(NETWORK_PORT),
        status_port=_free_port(STATUS_PORT),
        # Agents start in another directory, so the path must be absolute. The path keeps symbolic links, because Python
        # finds its virtual environment by the link.
        agent_python=str(Path(agent_python or sys.executable).absolute()),
        store_url=store_url,
        octavia_url=octavia_url,
        broker_url=broker_url,
        compute=compute or "netns",
        images=images,
        options=options or {},
        octavia_options=octavia_options or {},
    )
    state.mkdir(parents=True, exist_ok=True, mode=0o755)
    # The URLs in the file may contain passwords, so only its owner may read it.
    _file(state).touch(mode=0o600)
    _file(state).write_bytes(msgspec.json.format(msgspec.json.encode(settings)))
    return settings


def _file(state: Path) -> Path:
    return state / "sandbox.json"


def _free_prefix() -> str:
    taken = {name.partition("-")[0] for name in namespaces.names("")}
    return next(name for name in ("amp", *(f"amp{number}" for number in range(2, 100))) if name not in taken)


def _free_port(preferred: int) -> int:
    """The preferred port, or any other one if it is in use."""
    for port in (preferred, 0):
        if found := bind_port(port):
            return found
    raise SandboxError("find a free port", "all ports of 127.0.0.1 are in use")


def bind_port(port: int) -> int:
    """The number of this port of 127.0.0.1, or of any free port for 0; 0 if the port is in use."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)) as probe:
        return int(probe.getsockname()[1])
    return 0
