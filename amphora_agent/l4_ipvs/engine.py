# SPDX-License-Identifier: Apache-2.0
"""The engine for kernels with IPVS: keepalived says to the kernel who is there, this says to keepalived who is up.

Invariant: a file that keepalived watches has its old content or its new one, and nobody comes in with a weight of
before. Who is to be there at all is in keepalived's configuration, which is the agent's (`keepalived/lvs_process`):
the agent has it read after this has written the files. What IPVS needs of the kernel beside it (`lvs_rules`, settings)
is brought about here, so that it is there before IPVS forwards anything.
"""

# pathlib is a megabyte, and the checker has to be small.
# ruff: noqa: PTH103, PTH104, PTH108, PTH116, PTH118, PTH123, PTH208
from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from amphora_agent.errors import ConfigurationRefused, VirtualServersError
from amphora_agent.l4.eligible_members import States
from amphora_agent.l4.engine import Counters, MemberCounters, Place
from amphora_agent.l4.model import VirtualServer
from amphora_agent.l4_ipvs import netlink, nft_rules, track_files
from amphora_agent.l4_ipvs.netlink import Key, Service
from amphora_agent.l4_nftables import ruleset
from amphora_agent.l4_nftables.ruleset import FAMILY, TABLE, Table
from amphora_agent.network import libnftables
from amphora_agent.network.libnftables import STATELESS, NftError

# linux: Documentation/networking/ipvs-sysctl.rst
SETTINGS = {
    # Connection tracking knows the flows: only then can the client's address be hidden, and a limit be counted.
    "conntrack": "1",
    # A flow whose member is gone finds another one at its next packet.
    "expire_nodest_conn": "1",
    # A client that is bound to a member without weight is bound anew.
    "expire_quiescent_template": "1",
    # A client that begins again with the port of an ended SCTP association is scheduled like any other.
    "conn_reuse_mode": "1",
    # What goes to clients leaves by the VIP's network.
    "snat_reroute": "1",
}
# keepalived's own limit: 31 days.
LONGEST_PERSISTENCE = 31 * 86400
_PLACE = "/proc/sys/net/ipv4/vs"
_COUNTED = "counted.json"
# Of a member that nobody wants any more: keepalived may still be about to read its configuration.
_STALE_SECONDS = 60.0
# keepalived does what the files say within milliseconds.
_SETTLE_SECONDS = 0.2
_PERSISTENT = 1
_REFUSED = re.compile(r"counter refused-(\S+) \{\s+packets (\d+) bytes")
_DECLARED = re.compile(r"^\t(chain|map|set|counter) (\S+) \{", re.MULTILINE)
_LIST = f"list table {FAMILY} {TABLE}\n"
_COUNT = f"list counters table {FAMILY} {TABLE}\n"
_REMEDY = "Use a kernel with nf_tables, and install libnftables1 or nftables."
_Sums = tuple[int, int, int]
_NOTHING: _Sums = (0, 0, 0)
available = netlink.available


class LvsEngine:
    """Forwards by IPVS. Used by one thread, in the namespace that has the VIPs.

    Args:
        run: the directory in which the watched files are.
    """

    name = "lvs"

    def __init__(self, run: str) -> None:
        self._directory = os.path.join(run, track_files.DIRECTORY)
        self._servers: tuple[VirtualServer, ...] = ()
        self._table: Table | None = None
        self._listed = ""
        # What services have counted before they were made anew, by id; and each one's last figures.
        self._settled: dict[str, _Sums] = {}
        self._last: dict[tuple[str, str], _Sums] = {}

    def check(self, servers: Sequence[VirtualServer]) -> None:
        """Refuse what IPVS or keepalived cannot do.

        Raises:
            ConfigurationRefused: naming the listener.
        """
        for server in servers:
            if reason := _refusal(server):
                raise ConfigurationRefused(f"serve listener {server.id}", reason, object_id=server.id)

    def bring_about(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """See `Engine.bring_about`. Of a pair, keepalived tells the partner of the flows.

        Raises:
            VirtualServersError: nftables or the kernel's settings refused; the files are as before.
        """
        del paired
        self.check(servers)
        _set()
        self._bring_about_rules(nft_rules.table_of(servers))
        self._write(servers, up)
        self._servers = tuple(servers)

    def differs(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> list[str]:
        """See `Engine.differs`: files, rules, and what IPVS has.

        Raises:
            VirtualServersError, NoIpvsError: the kernel does not tell.
        """
        del paired
        found = []
        wanted = track_files.contents(servers, up)
        if any(self._read(name) != content for name, content in wanted.items()):
            found.append("the files that keepalived watches are not as wanted")
        if self._table is None or ruleset.exchange(self._table, nft_rules.table_of(servers)):
            found.append("the rules are not known to be as wanted")
        elif self._list() != self._listed:
            self._table = None  # the next change writes all of it anew
            found.append("the rules that forward are not as they were written")
        otherwise = list(_otherwise(servers, up, netlink.services()))
        if otherwise:
            time.sleep(_SETTLE_SECONDS)
            otherwise = list(_otherwise(servers, up, netlink.services()))
        return found + otherwise

    def counters(self) -> Mapping[str, Counters]:
        """See `Engine.counters`: bytes are those of IP packets, with their headers.

        UDP has no end that could be seen: a flow is active until nothing has come for two minutes.

        Raises:
            VirtualServersError, NoIpvsError: the kernel does not tell.
        """
        names = {(one.protocol, address, one.port): one.id for one in self._servers for address in one.addresses}
        found = {one.key: one for one in netlink.services() if one.key in names}
        self._settle(found, names)
        refused = self._refused()
        active = {one.id: 0 for one in self._servers}
        sums = {one.id: self._settled.get(one.id, _NOTHING) for one in self._servers}
        for key, one in found.items():
            name = names[key]
            sums[name] = _plus(sums[name], _sums(one))
            active[name] += sum(
                each.active + (each.inactive if one.protocol == "UDP" else 0) for each in one.destinations
            )
        return {name: Counters(active[name], *each, refused.get(name, 0)) for name, each in sums.items()}

    def balance(
        self, servers: Sequence[VirtualServer], up: Mapping[tuple[str, str], bool], *, paired: bool = False
    ) -> None:
        """See `Engine.balance`: the kernel's scheduler does so with every flow."""

    def member_counters(self) -> Mapping[Place, MemberCounters]:
        """See `Engine.member_counters`: since keepalived has made the services.

        Raises:
            NoIpvsError: the kernel does not tell.
        """
        names = {(one.protocol, address, one.port): one.id for one in self._servers for address in one.addresses}
        found: dict[Place, MemberCounters] = {}
        for one in netlink.services():
            for each in one.destinations if one.key in names else ():
                place = names[one.key], each.address, each.port
                before = found.get(place, MemberCounters())
                active = each.active + (each.inactive if one.protocol == "UDP" else 0)
                found[place] = MemberCounters(
                    before.active_connections + active,
                    before.total_connections + each.connections,
                    before.bytes_in + each.bytes_in,
                    before.bytes_out + each.bytes_out,
                )
        return found

    def release(self) -> None:
        """See `Engine.release`. IPVS ends with its keepalived, which is the agent's.

        Raises:
            VirtualServersError: nftables refused.
        """
        if libnftables.exists(FAMILY, TABLE):
            self._run(ruleset.without())
        self._table, self._listed, self._servers = None, "", ()
        self._settled, self._last = {}, {}
        with suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                os.unlink(os.path.join(self._directory, name))

    # -- what keepalived watches ---------------------------------------------------------------------------------------

    def _write(self, servers: Sequence[VirtualServer], up: States) -> None:
        wanted = track_files.contents(servers, up)
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            for name, content in wanted.items():
                self._put(name, content)
            self._leave(set(os.listdir(self._directory)) - wanted.keys())
        except OSError as error:
            raise VirtualServersError("tell keepalived who is up", str(error)) from error

    def _leave(self, unwanted: set[str]) -> None:
        """Who is not wanted is out at once; its files go when no keepalived can look at them any more."""
        for name in unwanted:
            what = name.rpartition(".")[2]
            if what not in track_files.OUT:
                continue
            self._put(name, track_files.OUT[what])
            path = os.path.join(self._directory, name)
            if time.time() - os.stat(path).st_mtime > _STALE_SECONDS:
                os.unlink(path)

    def _put(self, name: str, content: str) -> None:
        if self._read(name) == content:
            return
        # keepalived watches for a name that appears; one that begins with a dot it does not know.
        new = os.path.join(self._directory, f".{name}")
        with open(new, "w", encoding="ascii") as file:
            file.write(content)
        os.rename(new, os.path.join(self._directory, name))

    def _read(self, name: str) -> str | None:
        try:
            with open(os.path.join(self._directory, name), encoding="ascii") as file:
                return file.read()
        except FileNotFoundError:
            return None

    # -- the rules -----------------------------------------------------------------------------------------------------

    def _bring_about_rules(self, table: Table) -> None:
        commands = None if self._table is None else ruleset.exchange(self._table, table)
        if commands == "" and self._listed:
            return
        # What differs is written to what we think is there, only if it is.
        if not commands or self._list() != self._listed or not _could(commands):
            self._table = None
            self._renew_rules(table)
        self._table, self._listed = table, ""
        self._listed = self._list()

    def _renew_rules(self, table: Table) -> None:
        present = {name: word for word, name in _DECLARED.findall(self._list())}
        if not _could(ruleset.anew(present, table)):
            # Somebody's hand has been in it, or it is another engine's.
            self._run(ruleset.without() + ruleset.exchange(ruleset.EMPTY, table))

    def _list(self) -> str:
        return self._run(_LIST, STATELESS) if libnftables.exists(FAMILY, TABLE) else ""

    def _refused(self) -> dict[str, int]:
        if not libnftables.exists(FAMILY, TABLE):
            return {}
        return {name: int(packets) for name, packets in _REFUSED.findall(self._run(_COUNT))}

    def _run(self, commands: str, flags: int = 0) -> str:
        try:
            return libnftables.run(commands, flags)
        except NftError as error:
            raise VirtualServersError("forward UDP and SCTP", str(error), _REMEDY) from error

    # -- what was counted ----------------------------------------------------------------------------------------------

    def _settle(self, found: Mapping[Key, Service], names: Mapping[Key, str]) -> None:
        """Keep what a service had counted that is gone, or was made anew; also for the process after this one."""
        if not self._last and not self._settled:
            self._restore()
        now = {(names[key], f"{key[1]}"): _sums(one) for key, one in found.items()}
        lost = False
        for key, before in self._last.items():
            if any(one < other for one, other in zip(now.get(key, _NOTHING), before, strict=True)):
                self._settled[key[0]] = _plus(self._settled.get(key[0], _NOTHING), before)
                lost = True
        wanted = {one.id for one in self._servers}
        self._settled = {name: each for name, each in self._settled.items() if name in wanted}
        self._last = now
        if lost:
            with suppress(OSError):
                self._put(_COUNTED, json.dumps(self._settled))

    def _restore(self) -> None:
        with suppress(OSError, ValueError, TypeError, AttributeError):
            kept = json.loads(self._read(_COUNTED) or "{}")
            self._settled = {str(name): (int(one), int(two), int(three)) for name, (one, two, three) in kept.items()}


def _refusal(server: VirtualServer) -> str:
    """Why it cannot be served; empty if it can."""
    if (bound := server.persistence) is not None:
        if bound.timeout > LONGEST_PERSISTENCE:
            return f"IPVS keeps a client with its member for {LONGEST_PERSISTENCE} seconds at most, not {bound.timeout}"
        if not (bound.prefix_v4 and bound.prefix_v6):
            return "IPVS does not take all clients for one: a granularity is empty"
    places = [(one.address, one.port) for one in server.members if one.enabled]
    return "two of its members have the same address and port" if len(set(places)) != len(places) else ""


def _could(commands: str) -> bool:
    try:
        libnftables.run(commands)
    except NftError:
        return False
    return True


def _set() -> None:
    for name, value in SETTINGS.items():
        path = os.path.join(_PLACE, name)
        try:
            with open(path, encoding="ascii") as file:
                present = file.read().strip()
            if present != value:
                with open(path, "w", encoding="ascii") as file:
                    file.write(value)
        except OSError as error:
            raise VirtualServersError(
                f"set net.ipv4.vs.{name}", str(error), "Load the kernel's module ip_vs."
            ) from error


def _otherwise(servers: Sequence[VirtualServer], up: States, services: Sequence[Service]) -> Iterator[str]:
    present = {one.key: one for one in services}
    for server in servers:
        weights = track_files.weights(server, up)
        for address in server.addresses:
            members = track_files.members(server, address.version)
            service = present.pop((server.protocol, address, server.port), None)
            where = f"listener {server.id}: {address}"
            if service is None:
                if members:
                    yield f"{where} is not in IPVS"
                continue
            bound = server.persistence.timeout if server.persistence else 0
            timeout = service.timeout if service.flags & _PERSISTENT else 0
            if (service.scheduler, timeout) != (track_files.SCHEDULERS[server.algorithm], bound):
                yield f"{where} is scheduled otherwise"
            wanted = {(one.address, one.port): weights[one.id] for one in members if weights[one.id] is not None}
            if wanted != {(one.address, one.port): one.weight for one in service.destinations}:
                yield f"{where} has other members, or others of their weights"
    for protocol, host, port in present:
        yield f"IPVS forwards {protocol} {host} port {port}, which nobody wants"


def _sums(one: Service) -> _Sums:
    return one.connections, one.bytes_in, one.bytes_out


def _plus(one: _Sums, other: _Sums) -> _Sums:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
