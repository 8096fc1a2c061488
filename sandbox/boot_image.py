# SPDX-License-Identifier: Apache-2.0
"""An image, booted by hand, for whoever has just built one: ``diskimage/boot``.

Invariant: the machine is told what the controller would tell it, by the same config drive, and nothing of it stays but
what `--keep` names. Its network is qemu's own: nothing of this machine's is touched, no root is needed, and its agent
is reached through a port of the loopback.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path

from amphora_driver.certificates.ca import Authority, create_authority
from amphora_driver.compute import kvm_probe
from amphora_driver.compute.architecture import AMD64, ARCHITECTURES, Architecture, image_architecture
from amphora_driver.compute.config_drive import build_config_drive
from amphora_driver.compute.qemu_command import DRIVE, Hardware, manual_boot_command
from amphora_driver.compute.state_dirs import write_private
from amphora_driver.model.network import FixedAddress, Port, Subnet

_AGENT_PORT = 9443
# What qemu's own network gives its guest (QEMU's documentation, "Using the user mode network stack").
_SUBNET = Subnet(id="qemu", network_id="qemu", cidr="10.0.2.0/24", gateway="10.0.2.2")
_ADDRESS, _MAC = "10.0.2.15", "52:54:00:12:34:56"
_DAYS = 30
# How a qcow2 file begins (QEMU's docs/interop/qcow2.txt).
_QCOW2 = b"QFI\xfb"


def main(arguments: list[str] | None = None) -> int:
    """Console entry."""
    parser = argparse.ArgumentParser(
        prog="diskimage/boot", description="Boot an image, and say how to reach its agent."
    )
    parser.add_argument("image", type=Path, help="a disk that boots; it is not written to")
    parser.add_argument("--memory", type=int, default=512, help="MiB")
    parser.add_argument("--port", type=int, default=_AGENT_PORT, help="of 127.0.0.1, for the agent")
    parser.add_argument(
        "--arch", choices=sorted(ARCHITECTURES), help="of the image; default: what the manifest beside it says"
    )
    parser.add_argument(
        "--accelerator", choices=["auto", "kvm", "tcg"], default="auto", help="auto is tcg for arm64, wherever that is"
    )
    parser.add_argument(
        "--firmware", type=Path, help="instead of the usual one, as /usr/share/ovmf/OVMF.fd for UEFI on amd64"
    )
    parser.add_argument("--keep", type=Path, help="folder for disk, certificates and drive; they stay")
    chosen = parser.parse_args(arguments)
    for file in (chosen.image, chosen.firmware):
        if file is not None and not file.is_file():
            parser.error(f"there is no {file}")
    kind = image_architecture(chosen.image) if chosen.arch is None else ARCHITECTURES[chosen.arch]
    if shutil.which(kind.program) is None:
        parser.error(f"{kind.program} is not there. apt-get install {kind.package}")
    if chosen.firmware is None and kind.firmware is not None:
        chosen.firmware, package = Path(kind.firmware[0]), kind.firmware[1]
        if not chosen.firmware.is_file():
            parser.error(f"there is no {chosen.firmware}. apt-get install {package}")
    if not _free(chosen.port):
        parser.error(f"somebody has port {chosen.port} of 127.0.0.1; --port names another one")
    with ExitStack() as closing:
        folder = chosen.keep or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="amphora-")))
        folder.mkdir(parents=True, exist_ok=True)
        return _boot(folder.absolute(), chosen, kind)


def _boot(folder: Path, chosen: argparse.Namespace, kind: Architecture) -> int:
    amphora_id = str(uuid.uuid4())
    _write_drive(folder, amphora_id)
    # What is tried is a guest of amd64.
    found = chosen.accelerator == "auto" and kind is AMD64 and kvm_probe.usable(kind.program)
    accelerated = chosen.accelerator == "kvm" or found
    hardware = Hardware(
        program=kind.program,
        name=f"amphora-{amphora_id}",
        machine=kind.machine,
        architecture=kind,
        accelerated=accelerated,
        processors=1,
        memory=chosen.memory,
    )
    argv = manual_boot_command(
        hardware,
        str(chosen.image.absolute()),
        disk_format="qcow2" if _begins(chosen.image, _QCOW2) else "raw",
        forward=f"tcp:127.0.0.1:{chosen.port}-:{_AGENT_PORT}",
        mac=_MAC,
        firmware=None if chosen.firmware is None else str(chosen.firmware.absolute()),
    )
    place = shlex.quote(str(folder))
    sys.stdout.write(
        f"Amphora {amphora_id}, {'by KVM' if accelerated else 'emulated: a boot takes some minutes'}. "
        "When it has booted, its agent answers:\n\n"
        f"  curl --cacert {place}/amphora_ca.pem --cert {place}/controller.pem "
        f"--connect-to ::127.0.0.1:{chosen.port} https://{amphora_id}:{_AGENT_PORT}/v2/info\n\n"
        "Its console; Ctrl-C ends it.\n"
    )
    sys.stdout.flush()
    return _run(argv, folder)


def _run(argv: list[str], folder: Path) -> int:
    """Run qemu to its end. Whoever ends us ends it, and it has the time to give the terminal back as it was."""
    asked: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        for process in running:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    with subprocess.Popen(argv, cwd=folder) as process:
        running.append(process)
        if asked:
            process.terminate()
        status = process.wait()
    return 0 if asked else status


def _begins(file: Path, with_these: bytes) -> bool:
    with file.open("rb") as content:
        return content.read(len(with_these)) == with_these


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


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
    write_private(folder / DRIVE, build_config_drive(amphora_id, f"amphora-{amphora_id}", files, port, (_SUBNET,)))
    write_private(folder / "amphora_ca.pem", amphorae[0])
    write_private(folder / "controller.pem", Authority(*controllers).issue_client("by hand", _DAYS).bundle().reveal())


if __name__ == "__main__":
    sys.exit(main())
