# SPDX-License-Identifier: Apache-2.0
"""Makes a test disk from an image's tree: no partitions, no boot loader, and a remote shell.

Invariant: only the changes listed here are made to the tree, without a mount or a loop device. The kernel is the
tree's own. The initial RAM disk is replaced by one that loads four drivers, because the original one takes longer than
the rest of an emulated boot. `remote_shell` runs commands of tests.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
TAG = "amphora"
SIZE = "2G"
LABEL = "amphora-root"
_DRIVERS = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
_BUSYBOX = Path("/bin/busybox")
# Hardware of qemu's oldest machine type that no guest uses: probing it takes seconds.
_UNUSED = (
    "ata_piix,ata_generic,psmouse,floppy,i2c_piix4,pcspkr,parport_pc,mousedev,evdev,button,drm,bochs,"
    "rapl,intel_rapl_msr,intel_rapl_common,serio_raw,qemu_fw_cfg,joydev,input_leds"
)
# Optional units and modules, omitted for a faster boot. Guests of `USUAL` have all of them.
_MASKED = (
    "systemd-hwdb-update.service",
    "chrony.service",
    "systemd-journal-flush.service",
    "systemd-update-utmp.service",
)
USUAL = f"root=/dev/vda rw console=ttyS0 panic=10 quiet systemd.show_status=1 net.ifnames=0 module_blacklist={_UNUSED}"
# An emulated processor does not speculate, and the kernel's mitigations cost a quarter of the boot time.
QUICK = f"{USUAL} mitigations=off" + "".join(f" systemd.mask={unit}" for unit in _MASKED)
_UNIT = """[Unit]
Description=Remote shell for tests
After=systemd-networkd.service
[Service]
ExecStart=/usr/bin/python3 -I -S /usr/local/sbin/remote_shell.py
Restart=always
[Install]
WantedBy=multi-user.target
"""
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
{insert}
while ! [ -e /dev/vda ]; do /bin/busybox sleep 0.05; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount -o move /dev /root/dev
/bin/busybox umount /proc
exec /bin/busybox switch_root /root /sbin/init
"""


def make(tree: Path, place: Path) -> None:
    """Write TAG.qcow2, TAG.kernel, TAG.initrd and TAG.arguments.

    Args:
        tree: the image's tree; the remote shell is added to it.
        place: an existing folder.
    """
    _add_remote_shell(tree)
    raw = place / "disk.raw"
    subprocess.run(["truncate", "-s", SIZE, raw], check=True)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-L", LABEL, "-d", tree, raw], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", raw, place / f"{TAG}.qcow2"], check=True)
    raw.unlink()
    kernel = max((tree / "boot").glob("vmlinuz-*"))
    shutil.copyfile(kernel, place / f"{TAG}.kernel")
    (place / f"{TAG}.initrd").write_bytes(initrd(tree, kernel.name.removeprefix("vmlinuz-")))
    (place / f"{TAG}.arguments").write_text(QUICK)


def _add_remote_shell(tree: Path) -> None:
    shutil.copyfile(HERE / "remote_shell.py", tree / "usr/local/sbin/remote_shell.py")
    units = tree / "etc/systemd/system"
    (units / "remote-shell.service").write_text(_UNIT)
    wants = units / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    link = wants / "remote-shell.service"
    link.unlink(missing_ok=True)
    link.symlink_to("/etc/systemd/system/remote-shell.service")


def initrd(tree: Path, version: str) -> bytes:
    """Return an initial RAM disk for this kernel version."""
    modules = tree / "lib/modules" / version
    wanted = _with_what_they_need(modules)
    insert = "\n".join(f"/bin/busybox insmod /{Path(each).name}" for each in wanted)
    files = {"init": _INIT.format(insert=insert).encode(), "bin/busybox": _BUSYBOX.read_bytes()}
    files |= {Path(each).name: (modules / each).read_bytes() for each in wanted}
    return _cpio(("bin", "dev", "proc", "root"), files)


def _with_what_they_need(modules: Path) -> list[str]:
    """Return module paths, each after its dependencies (modules.dep(5))."""
    lines = (modules / "modules.dep").read_text().splitlines()
    needs = {left: right.split() for left, _, right in (line.partition(":") for line in lines)}
    paths = {Path(path).name.partition(".")[0].replace("-", "_"): path for path in needs}
    found: list[str] = []
    for name in _DRIVERS:
        if name in paths:  # the other modules are built in
            found += [path for path in (*reversed(needs[paths[name]]), paths[name]) if path not in found]
    return found


def _cpio(folders: tuple[str, ...], files: dict[str, bytes]) -> bytes:
    """Return a cpio archive for the kernel (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    rows = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
    rows += [(name, stat.S_IFREG | 0o755, content) for name, content in files.items()]
    made = bytearray()
    for number, (name, mode, content) in enumerate([*rows, ("TRAILER!!!", 0, b"")], 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        made += b"070701" + "".join(f"{field:08X}" for field in fields).encode() + name.encode() + b"\0"
        made += bytes(-len(made) % 4) + content
        made += bytes(-len(made) % 4)
    return bytes(made)
