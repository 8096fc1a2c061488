# SPDX-License-Identifier: Apache-2.0
"""Security groups and QoS policies of VIPs in the local network backend.

Invariant: the nftables rules of the switch follow from the database rows only; one transaction replaces all of them.
Each change of a row is followed by an enforcement. Concurrent enforcements are serialized by a lock, and each one reads
the rows under this lock.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from amphora_driver.database.tables import (
    local_address,
    local_port,
    local_qos_policy,
    local_security_group,
    local_vip_option,
)
from amphora_driver.errors import NetworkError, UnsupportedOption
from amphora_driver.host import namespaces
from amphora_driver.model.network import VipOptions
from amphora_driver.network import local_db, port_security_rules
from amphora_driver.network.bridges import switch_interface_name
from amphora_driver.network.port_security_rules import ProtectedVips, QosPolicy, Rule, SecurityGroup

if TYPE_CHECKING:
    from amphora_driver.database.engine import Database

_SECONDS = 30


class PortSecurity:
    """Security groups and QoS policies of one machine; `switch` is the namespace of the bridges."""

    def __init__(self, database: Database, switch: str) -> None:
        self._database = database
        self._switch = switch

    def define_policy(self, policy: QosPolicy) -> None:
        """Create or update a QoS policy; the change applies to VIPs immediately."""
        values = {"name": policy.name, "egress_kbps": policy.egress_kbps, "ingress_kbps": policy.ingress_kbps}
        self._database.write(lambda c: local_db.upsert(c, local_qos_policy, policy.id, values))
        self._enforce_if_any()

    def define_group(self, group: SecurityGroup) -> None:
        """Create or update a security group; the change applies to VIPs immediately.

        Raises:
            NetworkError: a rule is not valid.
        """
        port_security_rules.validate_group(group)
        values = {"name": group.name, "rules": msgspec.json.encode(group.rules).decode()}
        self._database.write(lambda c: local_db.upsert(c, local_security_group, group.id, values))
        self._enforce_if_any()

    def policies(self) -> tuple[QosPolicy, ...]:
        """All QoS policies."""
        return tuple(self._database.read(_policies).values())

    def groups(self) -> tuple[SecurityGroup, ...]:
        """All security groups."""
        return tuple(self._database.read(_groups).values())

    def apply_options(self, load_balancer_id: str, options: VipOptions, port_ids: Sequence[str]) -> None:
        """Apply exactly these options to the VIPs of a load balancer.

        Raises:
            UnsupportedOption: a policy or group does not exist.
            NetworkError: the kernel refuses the rules.
        """

        def write(connection: sa.Connection) -> None:
            _check_known(connection, load_balancer_id, options)
            connection.execute(local_vip_option.delete().where(local_vip_option.c.load_balancer_id == load_balancer_id))
            if options:
                values = {
                    "qos_policy_id": options.qos_policy_id,
                    "security_group_ids": msgspec.json.encode(options.security_group_ids).decode(),
                    "port_ids": msgspec.json.encode(list(port_ids)).decode(),
                }
                connection.execute(local_vip_option.insert().values(load_balancer_id=load_balancer_id, **values))

        self._database.write(write)
        self.enforce()

    def remove_options(self, load_balancer_id: str) -> None:
        """Remove the options of a load balancer; the next owner of an address does not inherit them."""
        mine = local_vip_option.c.load_balancer_id == load_balancer_id
        if self._database.read(lambda c: c.execute(sa.select(local_vip_option).where(mine)).first()) is None:
            return
        # The rules are removed before the row. If the process ends between both steps, the row still shows that the
        # switch may have rules.
        self._enforce(without=load_balancer_id)
        self._database.write(lambda c: c.execute(local_vip_option.delete().where(mine)))

    def enforce(self) -> None:
        """Replace the rules of the switch according to the rows; does nothing without a switch."""
        self._enforce()

    def _enforce_if_any(self) -> None:
        if self._database.read(lambda c: c.execute(sa.select(local_vip_option)).first()) is not None:
            self._enforce()

    def _enforce(self, without: str | None = None) -> None:
        if not namespaces.exists(self._switch):
            return
        place = namespaces.path(self._switch)
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            protected = [one for one in self._database.read(_read_protected) if one.load_balancer_id != without]
            _run_nft(str(place), port_security_rules.render_ruleset(protected))
        finally:
            os.close(descriptor)


def _run_nft(place: str, commands: str) -> None:
    argv = ["nsenter", f"--net={place}", "--", "nft", "-f", "-"]
    wanted = "apply the security groups and QoS policies of VIPs"
    try:
        done = subprocess.run(argv, input=commands, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(wanted, str(error), "Install nftables and util-linux.") from error
    if done.returncode != 0:
        raise NetworkError(
            wanted,
            done.stderr.strip() or f"nft exited with status {done.returncode}",
            "Use a kernel with nf_tables for bridges.",
        )


def _check_known(connection: sa.Connection, load_balancer_id: str, options: VipOptions) -> None:
    wanted = f"apply the options of the VIPs of load balancer {load_balancer_id}"
    if options.qos_policy_id and options.qos_policy_id not in _policies(connection):
        raise UnsupportedOption(wanted, f"QoS policy {options.qos_policy_id} does not exist")
    missing = sorted(set(options.security_group_ids) - set(_groups(connection)))
    if missing:
        raise UnsupportedOption(wanted, f"security group {', '.join(missing)} does not exist")


def _policies(connection: sa.Connection) -> dict[str, QosPolicy]:
    query = sa.select(local_qos_policy).order_by(local_qos_policy.c.name, local_qos_policy.c.id)
    return {row["id"]: QosPolicy(**row) for row in connection.execute(query).mappings()}


def _groups(connection: sa.Connection) -> dict[str, SecurityGroup]:
    query = sa.select(local_security_group).order_by(local_security_group.c.name, local_security_group.c.id)
    return {
        row.id: SecurityGroup(id=row.id, name=row.name, rules=_rules(row.rules)) for row in connection.execute(query)
    }


def _rules(text: str) -> tuple[Rule, ...]:
    return msgspec.json.decode(text, type=tuple[Rule, ...])


def _read_protected(connection: sa.Connection) -> list[ProtectedVips]:
    asked = connection.execute(sa.select(local_vip_option).order_by(local_vip_option.c.load_balancer_id)).all()
    known, limits = _groups(connection), _policies(connection)
    return [_protected_vips(connection, row, known, limits) for row in asked]


def _protected_vips(
    connection: sa.Connection, row: Any, known: dict[str, SecurityGroup], limits: dict[str, QosPolicy]
) -> ProtectedVips:
    vips = (
        sa.select(local_address.c.address)
        .join(local_port, local_port.c.id == local_address.c.port_id)
        .where(local_port.c.owner == f"lb-{row.load_balancer_id}")
        .order_by(local_address.c.ordinal)
    )
    ids = msgspec.json.decode(row.security_group_ids, type=list[str])
    # A security group that is missing in the database counts as a group without rules, which permits no traffic.
    groups = tuple(known.get(one, SecurityGroup(id=one, name=one)) for one in ids) if ids else None
    return ProtectedVips(
        load_balancer_id=row.load_balancer_id,
        addresses=tuple(connection.execute(vips).scalars()),
        interfaces=tuple(switch_interface_name(one) for one in msgspec.json.decode(row.port_ids, type=list[str])),
        groups=groups,
        policy=limits.get(row.qos_policy_id),
    )
