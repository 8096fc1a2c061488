# SPDX-License-Identifier: Apache-2.0
"""Manual boot of an image, to test it after a build: ``diskimage/boot``.

Invariant: the config drive has the same content as a drive from the controller. All files are temporary unless `--keep`
is given. The guest uses QEMU's user network, which needs no root and changes nothing on this machine. The agent is
reachable through a port on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import shutil
import signal
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
from sandbox.settings import bind_port

_AGENT_PORT = 9443
# QEMU's user network always assigns this address to the guest (QEMU's documentation, "Using the user mode network
# stack").
_SUBNET = Subnet(id="qemu", network_id="qemu", cidr="10.0.2.0/24", gateway="10.0.2.2")
_ADDRESS, _MAC = "10.0.2.15", "52:54:00:12:34:56"
_DAYS = 30
# The first bytes of a disk image in the format qcow2 (QEMU's docs/interop/qcow2.txt). A raw image has no such mark.
_QCOW2 = b"QFI\xfb"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of diskimage/boot."""
    words = "Boot an image and print how to reach its agent."
    parser = argparse.ArgumentParser(prog="diskimage/boot", description=words)
    add = parser.add_argument
    add("image", type=Path, help="disk image; the guest's changes to it are discarded")
    add("--memory", type=int, default=512, help="memory in MiB")
    add("--port", type=int, default=_AGENT_PORT, help="port of 127.0.0.1 that is forwarded to the agent")
    words = "architecture of the image; default: from the manifest beside it"
    add("--arch", choices=sorted(ARCHITECTURES), help=words)
    add("--accelerator", choices=["auto", "kvm", "tcg"], default="auto", help="auto always means tcg for arm64")
    words = "firmware instead of the default, for example /usr/share/ovmf/OVMF.fd for UEFI on amd64"
    add("--firmware", type=Path, help=words)
    add("--keep", type=Path, help="directory to keep certificates and config drive in")
    chosen = parser.parse_args(arguments)
    for file in (chosen.image, chosen.firmware):
        if file is not None and not file.is_file():
            parser.error(f"{file} does not exist")
    kind = image_architecture(chosen.image) if chosen.arch is None else ARCHITECTURES[chosen.arch]
    if shutil.which(kind.program) is None:
        parser.error(f"{kind.program} is not installed; apt-get install {kind.package}")
    if chosen.firmware is None and kind.firmware is not None:
        chosen.firmware, package = Path(kind.firmware[0]), kind.firmware[1]
        if not chosen.firmware.is_file():
            parser.error(f"{chosen.firmware} does not exist; apt-get install {package}")
    if not bind_port(chosen.port):
        parser.error(f"port {chosen.port} of 127.0.0.1 is in use; choose another one with --port")
    with ExitStack() as closing:
        folder = chosen.keep or Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="amphora-")))
        folder.mkdir(parents=True, exist_ok=True)
        return _boot(folder.absolute(), chosen, kind)


def _boot(folder: Path, chosen: argparse.Namespace, kind: Architecture) -> int:
    amphora_id = str(uuid.uuid4())
    _write_drive(folder, amphora_id)
    # The probe runs only an amd64 guest, so KVM is chosen automatically only for amd64 images.
    found = chosen.accelerator == "auto" and kind is AMD64 and kvm_probe.usable(kind.program)
    accelerated = chosen.accelerator == "kvm" or found
    with chosen.image.open("rb") as image:
        disk_format = "qcow2" if image.read(len(_QCOW2)) == _QCOW2 else "raw"
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
        disk_format=disk_format,
        forward=f"tcp:127.0.0.1:{chosen.port}-:{_AGENT_PORT}",
        mac=_MAC,
        firmware=None if chosen.firmware is None else str(chosen.firmware.absolute()),
    )
    place = shlex.quote(str(folder))
    sys.stdout.write(
        f"Amphora {amphora_id}, {'with KVM' if accelerated else 'emulated: the boot takes some minutes'}. "
        "After the boot, its agent answers:\n\n"
        f"  curl --cacert {place}/amphora_ca.pem --cert {place}/controller.pem "
        f"--connect-to ::127.0.0.1:{chosen.port} https://{amphora_id}:{_AGENT_PORT}/v2/info\n\n"
        "The console follows; Ctrl-C stops the machine.\n"
    )
    sys.stdout.flush()
    return _run(argv, folder)


def _run(argv: list[str], folder: Path) -> int:
    """Run QEMU until it ends. A signal to this process stops QEMU, which then restores the terminal."""
    received: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def end(number: int, _: object) -> None:
        received.append(number)
        for process in running:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    with subprocess.Popen(argv, cwd=folder) as process:
        running.append(process)
        if received:
            process.terminate()
        status = process.wait()
    return 0 if received else status


def _write_drive(folder: Path, amphora_id: str) -> None:
    amphorae, controllers = (create_authority(f"{kind} of a manual boot") for kind in ("amphorae", "controllers"))
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
    write_private(
        folder / "controller.pem", Authority(*controllers).issue_client("manual boot", _DAYS).bundle().reveal()
    )


if __name__ == "__main__":
    sys.exit(main())
