# SPDX-License-Identifier: Apache-2.0
"""A compute host with Nova's own libvirt driver on a started cloud (`provider_stack.py`).

nova-compute, libvirtd and QEMU run in the namespace of the switch, as on a machine with the bridges of all networks.
libvirtd has process ids of its own, and a file system whose changes are in the folder of the host: this machine needs
no user, file or service of libvirt, and all guests end with libvirtd. `tap_agent.py` connects their interfaces.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cloud_lab import HERE, VENV, run_command, write_ini
from tap_agent import READY

from amphora_driver.compute import kvm_probe
from amphora_driver.host import namespaces
from sandbox import forward_out

# Neutron binds ports of a host with this beginning of its name as taps (plugins/lab_ml2.py).
HOST = ZONE = "libvirt"
# Debian's package python3-libvirt has them: pip would compile them.
_PYTHON_MODULES = Path("/usr/lib/python3/dist-packages")
_LIBVIRTD, _AGENT, _FORWARDER = "libvirtd", "tap-agent", "forward-to-libvirt"
_QEMU = "qemu-system-x86_64"
# Of the upload in docs/how-to/build-an-image.md.
_PROPERTIES = {
    "hw_rng_model": "virtio",
    "hw_disk_bus": "virtio",
    "hw_vif_model": "virtio",
    "hw_vif_multiqueue_enabled": "true",
    "os_distro": "debian",
}
_FLAVOR = {"ram": 1024, "vcpus": 1, "disk": 2}
_QEMU_CONF = """user = "root"
group = "root"
remember_owner = 0
security_driver = "none"
cgroup_controllers = []
namespaces = []
stdio_handler = "file"
"""
# Debian's libvirt looks up this user even if another one runs the guests.
_ACCOUNT = "libvirt-qemu:x:64055:64055::/nonexistent:/usr/sbin/nologin\n"
_START = """set -e
for place in etc run var/cache var/lib var/log; do
  mkdir -p "$1/root/$place" "$1/work/$place"
  mount -t overlay -o "lowerdir=/$place,upperdir=$1/root/$place,workdir=$1/work/$place" overlay "/$place"
done
libvirtd --config "$1/libvirtd.conf" --pid-file "$1/libvirtd.pid" &
wait
"""


def missing():
    """Return what this machine lacks for the host; empty if it lacks nothing."""
    programs = {"libvirtd": "libvirt-daemon, libvirt-daemon-driver-qemu", _QEMU: "qemu-system-x86"}
    for name, packages in programs.items():
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: {packages})"
    argv = [VENV / "bin/python", "-c", "import libvirt"]
    done = subprocess.run(argv, env={"PYTHONPATH": str(_PYTHON_MODULES)}, capture_output=True, text=True, check=False)
    return f"python3-libvirt does not fit {VENV}: {done.stderr[-300:]}" if done.returncode else ""


class LibvirtHost:
    """The host inside a with block.

    Args:
        stack: a started `ProviderStack`.

    Attributes:
        accelerator: `kvm` where it works, otherwise `qemu` (emulation).
    """

    def __init__(self, stack):
        self.stack = stack
        self.cloud = stack.cloud
        self.folder = stack.cloud.folder / HOST
        self.accelerator = "kvm" if kvm_probe.usable(_QEMU) else "qemu"
        self._place = stack.cloud.namespace("switch")
        self._admin = stack.cloud.connect("admin", "admin")
        self._closing = ExitStack()

    def __enter__(self):
        with self._closing:
            self._write_files()
            ports = [str(port) for port in self.stack.forwarded()]
            self._run(_FORWARDER, sys.executable, "-m", forward_out.__name__, self._place, *ports)
            self._run(_AGENT, *self._inside(sys.executable, HERE / "tap_agent.py", self.cloud.hypervisor))
            own = ("unshare", "--fork", "--kill-child=KILL", "--pid", "--mount", "--propagation", "private")
            self._run(_LIBVIRTD, *self._inside(*own, "--mount-proc", "--", "sh", self.folder / "start", self.folder))
            self.cloud.until(_FORWARDER, lambda: forward_out.is_listening(self._place, tuple(self.stack.forwarded())))
            self.cloud.until(_AGENT, lambda: READY in self.cloud.log(_AGENT))
            self.cloud.until(_LIBVIRTD, self._socket.exists)
            self._serve_compute()
            self._register()
            self._closing = self._closing.pop_all()
        return self

    def __exit__(self, *_):
        self._closing.close()

    # --- processes --------------------------------------------------------------------------------------------------

    @property
    def _socket(self):
        return self.folder / "sockets/libvirt-sock"

    def _inside(self, *argv):
        """The arguments of a program in the namespace of the switch, with its interfaces in /sys."""
        return "ip", "netns", "exec", self._place, *argv

    def _run(self, name, *argv, environment=os.environ):
        self.cloud.run(name, argv, environment)
        self._closing.callback(self.cloud.kill, name)

    def _serve_compute(self):
        files = [word for file in self._files() for word in ("--config-file", file)]
        environment = self.cloud._environment({})
        environment["PYTHONPATH"] += f":{self.folder / 'python'}"
        self._run(HOST, *self._inside(VENV / "bin/nova-compute", *files), environment=environment)

    def _files(self):
        return self.cloud.file("nova"), self.folder / "compute.conf"

    def _write_files(self):
        for name in ("sockets", "python", "instances", "root/etc/libvirt"):
            (self.folder / name).mkdir(parents=True)
        for module in _PYTHON_MODULES.glob("libvirt*"):
            (self.folder / "python" / module.name).symlink_to(module)
        (self.folder / "start").write_text(_START)
        (self.folder / "libvirtd.conf").write_text(
            f'unix_sock_dir = "{self.folder}/sockets"\nauth_unix_ro = "none"\nauth_unix_rw = "none"\n'
            'log_outputs = "3:stderr"\n'
        )
        etc = self.folder / "root/etc"
        (etc / "libvirt/qemu.conf").write_text(_QEMU_CONF)
        (etc / "passwd").write_text(Path("/etc/passwd").read_text() + _ACCOUNT)
        (etc / "group").write_text(Path("/etc/group").read_text() + "libvirt-qemu:x:64055:\nkvm:x:64056:\n")
        helper = " ".join(map(str, (VENV / "bin/privsep-helper", *(f"--config-file={one}" for one in self._files()))))
        options = {
            "DEFAULT": {
                "host": HOST,
                "state_path": self.folder,
                "instances_path": self.folder / "instances",
                "compute_driver": "libvirt.LibvirtDriver",
            },
            "libvirt": {
                "virt_type": self.accelerator,
                "connection_uri": f"qemu+unix:///system?socket={self._socket}",
                # A guest of the machine type q35 needs a port for each interface that is attached later.
                "num_pcie_ports": 16,
            },
            "nova_sys_admin": {"helper_command": helper},
        }
        write_ini(self.folder / "compute.conf", options)

    # --- the operator -----------------------------------------------------------------------------------------------

    def _register(self):
        """Make the host known to Nova, in a zone of its own."""
        compute, placement = self._admin.compute, self._admin.placement
        known = {one.id for one in placement.resource_providers()}

        def is_described():
            # As for the other hosts (`whole_cloud.py`): Placement has the traits last.
            return any(
                placement.get(f"/resource_providers/{one.id}/traits", microversion="1.6").json()["traits"]
                for one in placement.resource_providers()
                if one.id not in known
            )

        self.cloud.until(HOST, is_described)
        manage = (VENV / "bin/nova-manage", "--config-file", self.cloud.file("nova"), "cell_v2", "discover_hosts")
        run_command(*manage, environment=self.cloud._environment({}))
        self.cloud.until(HOST, lambda: {one.host: one.state for one in compute.services()}.get(HOST) == "up")
        [service] = [one for one in compute.services() if one.host == HOST]
        self._closing.callback(compute.delete_service, service)
        aggregate = compute.create_aggregate(name=ZONE, availability_zone=ZONE)
        self._closing.callback(compute.delete_aggregate, aggregate)
        self.cloud.set_zone(HOST, ZONE)
        self._closing.callback(compute.remove_host_from_aggregate, aggregate, HOST)

    @contextmanager
    def placement(self, image, **properties):
        """Upload an image of amphorae for the host, and yield what a request for a load balancer there has.

        Args:
            image: the file of the disk (qcow2).
            properties: properties of the image, beside those that the documents recommend.
        """
        compute, balancers, glance = self._admin.compute, self._admin.load_balancer, self.cloud.connect().image
        with ExitStack() as closing:
            # The SDK does not close a file that it opens itself.
            with image.open("rb") as content:
                made = glance.create_image(
                    name=HOST, data=content, disk_format="qcow2", container_format="bare", tags=[HOST],
                    **_PROPERTIES, **properties,
                )  # fmt: skip
            closing.callback(glance.delete_image, made)
            flavor = compute.create_flavor(name=HOST, **_FLAVOR)
            closing.callback(compute.delete_flavor, flavor)
            data = json.dumps({"compute_flavor": flavor.id, "amp_image_tag": HOST})
            profile = balancers.create_flavor_profile(name=HOST, provider_name="haproxy", flavor_data=data)
            closing.callback(balancers.delete_flavor_profile, profile)
            chosen = balancers.create_flavor(name=HOST, flavor_profile_id=profile.id, is_enabled=True)
            closing.callback(balancers.delete_flavor, chosen)
            data = json.dumps({"compute_zone": ZONE})
            profile = balancers.create_availability_zone_profile(
                name=HOST, provider_name="haproxy", availability_zone_data=data
            )
            closing.callback(balancers.delete_availability_zone_profile, profile)
            zone = balancers.create_availability_zone(
                name=HOST, availability_zone_profile_id=profile.id, is_enabled=True
            )
            closing.callback(balancers.delete_availability_zone, zone.name)
            yield {"flavor_id": chosen.id, "availability_zone": HOST}

    # --- what the host has ------------------------------------------------------------------------------------------

    def objects(self):
        """The domains of libvirt, processes of QEMU, taps and disks of the host, by kind."""
        etc, run = (self.folder / "root" / one / "libvirt/qemu" for one in ("etc", "run"))
        links = namespaces.run_with_netlink(namespaces.path(self._place), lambda kernel: kernel.get_links())
        found = {
            "domain": [one.stem for one in etc.glob("*.xml")],
            "process": [one.stem for one in run.glob("*.pid") if one.stem != "driver"],
            "tap": [name for one in links if (name := one.get_attr("IFLA_IFNAME")).startswith("tap")],
            "disk": [one.parent.name for one in self.folder.glob("instances/*/disk*")],
        }
        return {kind: sorted(names) for kind, names in found.items() if names}

    @contextmanager
    def explained(self):
        """Add the consoles of the guests and the logs of the host to a failure of the block."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._logs()}") from error

    def _logs(self):
        consoles = [one.read_text(errors="replace")[-4000:] for one in self.folder.glob("instances/*/console.log")]
        return "\n".join([*consoles, *(f"--- {one}\n{self.cloud.log(one)}" for one in (HOST, _LIBVIRTD, _AGENT))])
