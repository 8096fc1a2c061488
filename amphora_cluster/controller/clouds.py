# SPDX-License-Identifier: Apache-2.0
"""The cloud of a group's owner, as a pass uses it; the connections of a process.

Invariant: a connection belongs to one application credential. Groups with the same credential share connection, token
and list of servers. A connection without use for an hour is closed, because its token has expired or will.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import Protocol

from amphora_cluster.cloud.heat import HeatStacks
from amphora_cluster.cloud.nova import NovaServers
from amphora_cluster.cloud.octavia import Applied, OctaviaPools
from amphora_cluster.cloud.options import CloudSettings
from amphora_cluster.cloud.session import CloudConnection
from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.model import Group, Pool, Server, Step

# Seconds after which an unused connection to a cloud is dropped.
_UNUSED_SECONDS = 3600.0
# Seconds for which a pass repeats a change that Octavia refuses because the load balancer is busy. Afterwards, its
# thread must be free for other groups.
_PATIENCE = 3.0


class Cloud(Protocol):
    """The calls of a pass. Errors are those of amphora_cluster/cloud/errors.py."""

    def servers(self, group: Group, known: Collection[str], *, fresh: bool) -> tuple[Server, ...]: ...

    def read_pool(self, group: Group, *, connections: bool) -> Pool: ...

    def apply(self, group: Group, steps: Sequence[Step]) -> Applied: ...

    def delete_load_balancer(self, group: Group) -> bool: ...


class CloudsOfOwners(Protocol):
    """The clouds of all owners."""

    def get(self, group: Group, credential: ApplicationCredential | None) -> Cloud: ...

    def servers_changed(self, project_ids: Collection[str]) -> None: ...


class OpenStackCloud:
    """Nova, Heat and Octavia with one application credential."""

    def __init__(self, settings: CloudSettings, credential: ApplicationCredential | None, project_id: str) -> None:
        connection = CloudConnection(settings, credential, project_id)
        self._pools = OctaviaPools(connection, _PATIENCE)
        self._nova = NovaServers(connection, HeatStacks(connection))
        self.used_at = time.monotonic()

    def servers(self, group: Group, known: Collection[str], *, fresh: bool) -> tuple[Server, ...]:
        """Return the servers of a group; see `NovaServers.servers`."""
        subnets = group.member.subnet_id is not None
        return self._nova.servers(group.selector, known=known, subnets=subnets, fresh=fresh)

    def read_pool(self, group: Group, *, connections: bool) -> Pool:
        """Return the pool of a group; see `OctaviaPools.read_pool`."""
        return self._pools.read_pool(group, connections=connections)

    def apply(self, group: Group, steps: Sequence[Step]) -> Applied:
        """Make the changes of a plan; see `OctaviaPools.apply`."""
        return self._pools.apply(group, steps)

    def delete_load_balancer(self, group: Group) -> bool:
        """Delete the load balancer that a group owns; return whether it is gone."""
        return self._pools.delete_load_balancer(group.id, group.load_balancer_id)

    def servers_changed(self) -> None:
        """Read the servers again in the next pass."""
        self._nova.servers_changed()


class Clouds:
    """The connections of this process, for any thread."""

    def __init__(self, settings: CloudSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._clouds: dict[tuple[str, str, bytes], OpenStackCloud] = {}

    def get(self, group: Group, credential: ApplicationCredential | None) -> Cloud:
        """Return the cloud of a group's owner."""
        # The key contains a digest of the secret. So a replaced secret leads to a new connection.
        secret = b"" if credential is None else hashlib.sha256(credential.secret.reveal()).digest()
        key = (group.project_id, "" if credential is None else credential.id, secret)
        now = time.monotonic()
        with self._lock:
            self._clouds = {one: cloud for one, cloud in self._clouds.items() if now - cloud.used_at < _UNUSED_SECONDS}
            if key not in self._clouds:
                self._clouds[key] = OpenStackCloud(self._settings, credential, group.project_id)
            self._clouds[key].used_at = now
            return self._clouds[key]

    def servers_changed(self, project_ids: Collection[str]) -> None:
        """Read the servers of these projects again in the next pass."""
        with self._lock:
            found = [cloud for (project, *_), cloud in self._clouds.items() if project in project_ids]
        for cloud in found:
            cloud.servers_changed()
