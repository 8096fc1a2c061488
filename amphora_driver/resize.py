# SPDX-License-Identifier: Apache-2.0
"""Resize: another flavor or availability zone for an existing load balancer.

Invariant: the new profile passes the checks of a new load balancer, together with all listeners and pools. Profile,
topology and the fail-over of the amphorae are recorded in one transaction. Octavia continues to show the flavor and the
availability zone of the creation, because no interface of Octavia lets a provider change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from oslo_config.cfg import ConfigOpts

from amphora_driver.database.engine import Database
from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.loadbalancer import LoadBalancer, Node
from amphora_driver.plugins import Catalogue
from amphora_driver.store.failovers import FailoverTrigger
from amphora_driver.store.requests import RequestRecorder
from amphora_driver.store.resizes import Resize
from amphora_driver.validation import availability_zones, profile
from amphora_driver.validation.in_context import ContextCheck


class ResizeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The requested profile.

    Attributes:
        trigger: cause, reason and origin of the request, for the history.
        flavor: the metadata of the flavor; None keeps the present one.
        zone: the metadata of the availability zone; None keeps the present one.
    """

    trigger: FailoverTrigger
    flavor: Mapping[str, Any] | None = None
    zone: Mapping[str, Any] | None = None


class Resizer:
    """Records resizes."""

    def __init__(self, conf: ConfigOpts, database: Database, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        check = ContextCheck(conf, lambda name: catalogue.network(name).supports)
        self._recorder = RequestRecorder(database, _refuse_objects, check)

    def preview(self, load_balancer_id: str, target: ResizeTarget) -> Resize:
        """Return the resize that `record` would record, with the same errors; write nothing."""
        return self._recorder.preview_resize(load_balancer_id, lambda tree: self._choose(tree, target), _compare)

    def record(self, load_balancer_id: str, target: ResizeTarget, *, pending: bool = False) -> Resize:
        """Record a resize; a controller performs it.

        Args:
            load_balancer_id: the load balancer.
            target: the requested profile.
            pending: Octavia has set the load balancer PENDING_UPDATE, and waits for the result.

        Raises:
            UnsupportedOption: the profile is invalid, or contradicts an object of the load balancer.
            Conflict: the load balancer is being created, failed over or deleted, or already has these values.
            UnknownObject: the load balancer is not recorded.
            BackendError: the backend could not check the profile.
        """
        # The check may send requests to the cloud. A database transaction must not stay open during such requests.
        found = self.preview(load_balancer_id, target)
        self._check_cloud(found.tree, target)
        return self._recorder.resize(
            load_balancer_id, lambda tree: self._choose(tree, target), _compare, target.trigger, pending=pending
        )

    def _choose(self, tree: LoadBalancer, target: ResizeTarget) -> LoadBalancer:
        flavor = tree.flavor if target.flavor is None else dict(target.flavor)
        zone = tree.availability_zone if target.zone is None else dict(target.zone)
        chosen = profile.choose_resized_profile(tree.profile, flavor, zone, self._catalogue.deployment())
        availability_zones.check_zone_vips(zone, tree.vips)
        return msgspec.structs.replace(tree, profile=chosen, flavor=flavor, availability_zone=zone)

    def _check_cloud(self, tree: LoadBalancer, target: ResizeTarget) -> None:
        """Check that the cloud has the objects that the new metadata name."""
        for metadata in (target.flavor or {}, target.zone or {}):
            self._catalogue.validate_profile(metadata, tree.profile.compute, tree.profile.network)


def _compare(former: LoadBalancer, new: LoadBalancer) -> bool:
    return profile.needs_new_amphorae(former.profile, new.profile)


def _refuse_objects(node: Node) -> None:
    """Raise an error: a resize must not change a listener, a pool or another object of a user."""
    raise UnsupportedOption(f"change object {node.id}", "a resize changes the profile only")
