# SPDX-License-Identifier: Apache-2.0
"""OVN with two chassis in network namespaces, without a kernel module.

Invariant: the processes end with the test process, also after SIGKILL. Namespaces of a run that was killed are removed
by the next run. All files are below the given directory. No address or interface is added to the root namespace.

    northbound DB ── ovn-northd ── southbound DB
                                    │         │
    chassis 1: ovn-controller, ovs-vswitchd ══ Geneve ══ chassis 2: ovn-controller, ovs-vswitchd

The datapath type is `netdev`: ovs-vswitchd forwards packets and tracks connections in user space. The packages are
ovn-central, ovn-host, openvswitch-switch and ethtool (Debian 12: OVN 23.03, Open vSwitch 3.1).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The tests use amphorae, members and clients of the data plane's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "dataplane"))

from amphora_lab import alive, eventually, ip

CHASSIS = (1, 2)
# The MTU that Neutron announces for a Geneve network on an underlay with an MTU of 1500 (IPv4).
UNDERLAY_MTU, MTU = 1500, 1442
_UNDERLAY = "203.0.113.20{}"
_SCHEMAS = Path("/usr/share/ovn")
_SWITCH_SCHEMA = Path("/usr/share/openvswitch/vswitch.ovsschema")
_END_SECONDS = 5.0
# The first OpenFlow table of the egress pipeline (ovn/controller/lflow.h).
_TO_PORTS = 42
# With offloads, AF_PACKET delivers packets without a checksum, or larger than the MTU.
_OFFLOADS = ("tx", "tso", "gso", "gro")


def disable_offloads(namespace: str, device: str) -> None:
    """Let the kernel compute checksums and segments of a device that ovs-vswitchd reads."""
    wanted = [word for each in _OFFLOADS for word in (each, "off")]
    command = ["ip", "netns", "exec", namespace, "ethtool", "-K", device, *wanted]
    subprocess.run(command, check=True, capture_output=True)


def remove_orphans(kind: str) -> None:
    """Remove the namespaces of killed runs.

    A name consists of the kind, the process id of the run, and a short name.
    """
    listed = subprocess.run(["ip", "-j", "netns"], check=True, capture_output=True, text=True).stdout
    for name in (each["name"] for each in json.loads(listed or "[]")):
        match = re.fullmatch(rf"{kind}(\d+)-\w+", name)
        if match and not alive(int(match[1])):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@dataclass(frozen=True)
class Claim:
    """A change of a virtual port in the southbound database.

    Attributes:
        at: monotonic time at which the change was received.
        port: the logical port.
        parent: the port that has the VIP now; empty if no port has it.
    """

    at: float
    port: str
    parent: str


class Claims:
    """The parents of the virtual ports, as the southbound database publishes them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._changed = threading.Condition()
        self._found: list[Claim] = []
        self._thread = threading.Thread(target=self._run, daemon=True, name="claims")
        self._thread.start()

    def _run(self) -> None:
        for line in self._process.stdout:
            at, table = time.monotonic(), json.loads(line)
            names = table["headings"]
            rows = [dict(zip(names, row, strict=True)) for row in table["data"]]
            with self._changed:
                self._found += [
                    Claim(
                        at, row["logical_port"], row["virtual_parent"] if isinstance(row["virtual_parent"], str) else ""
                    )
                    for row in rows
                    if row["action"] in ("initial", "insert", "new")
                ]
                self._changed.notify_all()

    def close(self) -> None:
        """Called after the process has ended."""
        self._thread.join()
        self._process.stdout.close()

    def parent(self, port: str) -> str:
        """Return the present parent of a virtual port."""
        with self._changed:
            return next((each.parent for each in reversed(self._found) if each.port == port), "")

    def await_parent(self, port: str, parent: str, since: float, seconds: float = 10.0) -> float:
        """Wait until the port has this parent; return the seconds from `since` to the change."""

        def found() -> list[Claim]:
            return [each for each in self._found if (each.port, each.parent) == (port, parent) and each.at >= since]

        with self._changed:
            assert self._changed.wait_for(found, seconds), f"{port} has no parent {parent}: {self._found}"
            return found()[0].at - since


class Ovn:
    """The databases, northd, and two chassis.

    Args:
        prefix: of the names of the namespaces.
        directory: databases, sockets and logs; a short path, because of the limit for sockets.
    """

    def __init__(self, prefix: str, directory: Path) -> None:
        self._prefix = prefix
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._made: list[str] = []
        try:
            self._start_central()
            for chassis in CHASSIS:
                self._make_namespace(chassis)
            self._connect_chassis()
            for chassis in CHASSIS:
                self._start_chassis(chassis)
            self.nb("--wait=hv", "sync")
        except BaseException:
            self.close()
            raise

    # -- commands --------------------------------------------------------------------------------------------------

    def nb(self, *words: str) -> str:
        """Run ovn-nbctl; with `--wait=hv` first, wait until both chassis have applied the change."""
        return self._ask("ovn-nbctl", "--no-leader-only", f"--db=unix:{self._directory}/nb.sock", *words)

    def vs(self, chassis: int, *words: str) -> str:
        """Run ovs-vsctl; wait until ovs-vswitchd has applied the change."""
        return self._ask("ovs-vsctl", "--timeout=20", f"--db=unix:{self._directory}/ch{chassis}/db.sock", *words)

    def flows(self, chassis: int) -> str:
        """Return the flows of the integration bridge with their counters."""
        target = f"unix:{self._directory}/ch{chassis}/br-int.mgmt"
        return self._ask("ovs-ofctl", "--protocols=OpenFlow15", "dump-flows", target)

    @staticmethod
    def _ask(*words: str) -> str:
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def namespace(self, chassis: int) -> str:
        return f"{self._prefix}-ch{chassis}"

    # -- processes -------------------------------------------------------------------------------------------------

    def _start(self, name: str, *command: str, chassis: int | None = None, **more) -> subprocess.Popen[str]:
        """Start a process that ends with this one."""
        inside = [] if chassis is None else ["nsenter", f"--net=/run/netns/{self.namespace(chassis)}", "--"]
        place = self._directory if chassis is None else self._directory / f"ch{chassis}"
        log = self._directory / f"{name}.out"
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *inside, *command],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OVS_RUNDIR": str(place), "OVN_RUNDIR": str(place)},
                start_new_session=True,
                text=True,
                **{"stdout": output, "stderr": output, **more},
            )
        self._processes[name] = process
        return process

    def _start_database(self, name: str, schema: Path, place: Path, chassis: int | None = None) -> None:
        file = place / f"{name}.db"
        self._ask("ovsdb-tool", "create", str(file), str(schema))
        options = (f"--remote=punix:{place}/{name}.sock", f"--unixctl={place}/{name}.ctl")
        self._start(f"{name}{chassis or ''}", "ovsdb-server", str(file), *options, chassis=chassis)
        eventually((place / f"{name}.sock").is_socket, f"the database {name} listens")

    def _start_central(self) -> None:
        for name in ("nb", "sb"):
            self._start_database(name, _SCHEMAS / f"ovn-{name}.ovsschema", self._directory)
        north, south = (f"unix:{self._directory}/{name}.sock" for name in ("nb", "sb"))
        self.nb("init")
        self._ask("ovn-sbctl", "--no-leader-only", f"--db={south}", "init")
        control = f"--unixctl={self._directory}/northd.ctl"
        self._start("northd", "ovn-northd", f"--ovnnb-db={north}", f"--ovnsb-db={south}", control)
        columns = ("Port_Binding", "logical_port,virtual_parent")
        command = ("ovsdb-client", "--format=json", "monitor", south, "OVN_Southbound", *columns)
        self.claims = Claims(self._start("claims", *command, stdout=subprocess.PIPE))

    def _make_namespace(self, chassis: int) -> None:
        name = self.namespace(chassis)
        ip(f"netns add {name}")
        self._made.append(name)
        ip(f"-n {name} link set lo up")

    def _connect_chassis(self) -> None:
        first, second = map(self.namespace, CHASSIS)
        ip(f"-n {first} link add phy0 type veth peer name phy0 netns {second}")
        for name in (first, second):
            ip(f"-n {name} link set phy0 mtu {UNDERLAY_MTU} up")
            disable_offloads(name, "phy0")

    def _start_chassis(self, chassis: int) -> None:
        place = self._directory / f"ch{chassis}"
        place.mkdir()
        self._start_database("db", _SWITCH_SCHEMA, place, chassis)
        self.vs(chassis, "--no-wait", "init")
        facts = {
            "system-id": f"ch{chassis}",
            "hostname": f"ch{chassis}",
            "ovn-remote": f"unix:{self._directory}/sb.sock",
            "ovn-encap-type": "geneve",
            "ovn-encap-ip": _UNDERLAY.format(chassis),
            "ovn-bridge-datapath-type": "netdev",
        }
        # A tunnel in user space needs its local address on a bridge of the same ovs-vswitchd.
        self.vs(
            chassis,
            "--no-wait",
            *("set", "Open_vSwitch", ".", *(f'external_ids:{name}="{value}"' for name, value in facts.items())),
            *("--", "add-br", "br-int", "--", "set", "bridge", "br-int", "datapath_type=netdev", "fail_mode=secure"),
            *("--", "add-br", "br-phy", "--", "set", "bridge", "br-phy", "datapath_type=netdev"),
            *("--", "add-port", "br-phy", "phy0"),
        )
        self._start_switch(chassis)
        log = f"--log-file={place}/controller.log"
        database = f"unix:{place}/db.sock"
        self._start(f"controller{chassis}", "ovn-controller", database, log, "-vconsole:off", chassis=chassis)

    def _start_switch(self, chassis: int) -> None:
        """Start ovs-vswitchd, which creates the interfaces of the bridges; they end with it."""
        place, name = self._directory / f"ch{chassis}", self.namespace(chassis)
        control = (f"--unixctl={place}/ovs-vswitchd.ctl", f"--log-file={place}/vswitchd.log", "-vconsole:off")
        self._start(f"vswitchd{chassis}", "ovs-vswitchd", f"unix:{place}/db.sock", *control, chassis=chassis)
        self.vs(chassis, "set", "bridge", "br-phy", "other_config:started=true")  # returns when the bridges exist
        ip(f"-n {name} addr replace {_UNDERLAY.format(chassis)}/24 dev br-phy", f"-n {name} link set br-phy up")

    def restart_switches(self) -> None:
        """Start each ovs-vswitchd that has ended.

        Version 3.1.0 aborts sometimes (conntrack.c, conn_update_state).
        """
        ended = set(CHASSIS) - set(self.switches())
        for chassis in ended:
            self._start_switch(chassis)
        if ended:
            self.nb("--wait=hv", "sync")

    def switches(self) -> dict[int, int]:
        """Return the process ids of the running ovs-vswitchd by chassis."""
        found = {chassis: self._processes[f"vswitchd{chassis}"] for chassis in CHASSIS}
        return {chassis: process.pid for chassis, process in found.items() if process.poll() is None}

    def complaints(self) -> str:
        """Return the errors in the logs of both ovs-vswitchd."""
        logs = [self._directory / f"ch{chassis}/vswitchd.log" for chassis in CHASSIS]
        lines = [line for log in logs if log.exists() for line in log.read_text().splitlines()]
        return "\n".join(line for line in lines if re.search(r"\|(EMER|ERR)\|", line))

    def invalid(self, chassis: int) -> int:
        """Return the number of packets from a chassis's ports that match no tracked connection.

        Security groups drop these packets.
        """
        pattern = r"table=(\d+),[^\n]*n_packets=(\d+)[^\n]*priority=65532,ct_state=\+inv\+trk"
        return sum(
            int(packets) for table, packets in re.findall(pattern, self.flows(chassis)) if int(table) < _TO_PORTS
        )

    # -- ports -----------------------------------------------------------------------------------------------------

    def plug(self, chassis: int, namespace: str, device: str, port: str, mac: str) -> None:
        """Connect a new interface of a namespace with a logical port."""
        ours, peer = self.namespace(chassis), f"peer name {device} netns {namespace}"
        ip(
            f"-n {ours} link add {port} mtu {MTU} type veth {peer} address {mac} mtu {MTU}",
            f"-n {ours} link set {port} up",
        )
        disable_offloads(namespace, device)
        self.bind(chassis, port, port)

    def bind(self, chassis: int, device: str, port: str) -> None:
        """Make a device of a chassis the interface of a logical port."""
        self.vs(
            chassis, "add-port", "br-int", device, "--", "set", "interface", device, f"external_ids:iface-id={port}"
        )

    def unplug(self, chassis: int, port: str) -> None:
        # Without ovs-vswitchd, ovs-vsctl would wait forever.
        waiting = () if chassis in self.switches() else ("--no-wait",)
        self.vs(chassis, *waiting, "--if-exists", "del-port", "br-int", port)
        command = ["ip", "-n", self.namespace(chassis), "link", "del", port]
        subprocess.run(command, check=False, capture_output=True)

    def close(self) -> None:
        """End the processes of this object, the last one first."""
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
        if "claims" in self._processes:
            self.claims.close()
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
