# SPDX-License-Identifier: Apache-2.0
"""An image, booted by hand, for whoever has just built one: ``diskimage/boot``.

Invariant: the machine is told what the controller would tell it, by the same config drive, and nothing of it stays but
what `--keep` names. Its network is qemu's own: nothing of this machine's is touched, no root is needed, and its agent
is reached through a port of the loopback.
"""

from __future__ import annotations

import argparse
import secrets
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

from amphora_driver.certificates.authority import Authority, create_authority
from amphora_driver.compute import acceleration
from amphora_driver.compute.config_drive import config_drive
from amphora_driver.compute.folders import write
from amphora_driver.compute.qemu_command import DRIVE, Hardware, hand_command
from amphora_driver.network.interface import FixedAddress, Port, Subnet

_AGENT_PORT = 9443
# What qemu's own network gives its guest (QEMU's documentation, "Using the user mode network stack").
_SUBNET = Subnet(id="qemu", network_id="qemu", cidr="10.0.2.0/24", gateway="10.0.2.2")
_ADDRESS, _MAC = "10.0.2.15", "52:54:00:12:34:56"
_DAYS = 30
_PROGRAM = "qemu-system-x86_64"


def main(arguments: list[str] | None = None) -> int:
    """Console entry."""
    parser = argparse.ArgumentParser(
        prog="diskimage/boot", description="Boot an image, and say how to reach its agent."
    )
    parser.add_argument("image", type=Path, help="a disk that boots; it is not written to")
    parser.add_argument("--memory", type=int, default=512, help="MiB")
    parser.add_argument("--port", type=int, default=_AGENT_PORT, help="of 127.0.0.1, for the agent")
    parser.add_argument("--accelerator", choices=["auto", "kvm", "tcg"], default="auto")
    parser.add_argument("--keep", type=Path, help="folder for disk, certificates and drive; they stay")
    chosen = parser.parse_args(arguments)
    if not chosen.image.is_file():
        parser.error(f"there is no {chosen.image}")
    with ExitStack() as closing:
        folder = chosen.keep or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="amphora-")))
        folder.mkdir(parents=True, exist_ok=True)
        return _boot(folder.absolute(), chosen)


def _boot(folder: Path, chosen: argparse.Namespace) -> int:
    amphora_id = str(uuid.uuid4())
    _write_drive(folder, amphora_id)
    accelerated = chosen.accelerator == "kvm" or (chosen.accelerator == "auto" and acceleration.usable(_PROGRAM))
    hardware = Hardware(
        program=_PROGRAM,
        name=f"amphora-{amphora_id}",
        machine="pc",
        accelerated=accelerated,
        processors=1,
        memory=chosen.memory,
    )
    forward = f"tcp:127.0.0.1:{chosen.port}-:{_AGENT_PORT}"
    argv = hand_command(hardware, str(chosen.image.absolute()), forward, _MAC)
    sys.stdout.write(
        f"Amphora {amphora_id}, {'by KVM' if accelerated else 'emulated: a boot takes a minute or more'}. "
        "When it has booted, its agent answers:\n\n"
        f"  curl --cacert {folder}/amphora_ca.pem --cert {folder}/controller.pem "
        f"--connect-to ::127.0.0.1:{chosen.port} https://{amphora_id}:{_AGENT_PORT}/v2/info\n\n"
        "Its console; Ctrl-C ends it.\n"
    )
    sys.stdout.flush()
    try:
        return subprocess.run(argv, cwd=folder, check=False).returncode
    except KeyboardInterrupt:
        return 0


def _write_drive(folder: Path, amphora_id: str) -> None:
    amphorae, controllers = create_authority("amphorae by hand"), create_authority("controllers by hand")
    conf = (
        f"[agent]\namphora_id = {amphora_id}\nbind_address = {_ADDRESS}\nbind_port = {_AGENT_PORT}\n"
        "services = systemd\n[heartbeat]\ninterval = 10\ntargets =\n"
    )
    files = {
        "agent.conf": conf.encode(),
        "server.pem": Authority(*amphorae).issue_server(amphora_id, _DAYS).bundle().reveal(),
        "client_ca.pem": controllers[0],
        "server_ca.pem": amphorae[0],
        "heartbeat.key": secrets.token_bytes(32).hex().encode(),
    }
    fixed = (FixedAddress(subnet_id=_SUBNET.id, address=_ADDRESS),)
    port = Port(id="management", network_id=_SUBNET.network_id, mac=_MAC, mtu=1500, addresses=fixed)
    write(folder / DRIVE, config_drive(amphora_id, f"amphora-{amphora_id}", files, port, (_SUBNET,)))
    write(folder / "amphora_ca.pem", amphorae[0])
    write(folder / "controller.pem", Authority(*controllers).issue_client("by hand", _DAYS).bundle().reveal())


if __name__ == "__main__":
    sys.exit(main())
