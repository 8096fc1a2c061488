# SPDX-License-Identifier: Apache-2.0
"""Questions and requests of an adoption to the agents of the new amphorae."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentError
from amphora_driver.store import amphorae

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amphora_driver.agent.client import AgentClient
    from amphora_driver.database.engine import Database

LOG = logging.getLogger(__name__)
# Seconds for the answers of all amphorae of a load balancer.
_SECONDS = 3.0


class NewAmphorae:
    """The new amphorae of the load balancers in adoption."""

    def __init__(self, database: Database, agents: AgentClient) -> None:
        self._database = database
        self._agents = agents

    def have_vips(self, load_balancer_id: str) -> bool:
        """Return whether an amphora has the VIPs; a single amphora has them with its configuration."""
        deadline, said, number = Deadline(_SECONDS, "query the VIPs"), [], 0
        for one, address in self._addresses(load_balancer_id):
            number += 1
            try:
                said.append(self._agents.info(one, address, deadline=deadline).holds_vip)
            except AgentError as error:
                LOG.warning("the controller does not know whether amphora %s holds the VIPs: %s", one, error)
        return any(said) or (len(said) == number and all(one is None for one in said))

    def announce_vips(self, load_balancer_id: str) -> None:
        """Let a single amphora announce its VIPs again; keepalived of a pair does this itself.

        Until the ports of the former amphorae are disabled, both answer ARP requests. So a client may have learned a
        former MAC address. A failure is not an error, because clients find the amphora after about 10 seconds.
        """
        deadline = Deadline(_SECONDS, "announce the VIPs")
        for one, address in self._addresses(load_balancer_id):
            try:
                self._agents.announce_vips(one, address, deadline=deadline)
            except AgentError as error:
                text = "amphora %s did not announce its VIPs again, so clients may have no answer for 10 s: %s"
                LOG.warning(text, one, error)

    def _addresses(self, load_balancer_id: str) -> Iterator[tuple[str, str]]:
        """Yield the ids of the amphorae and their management addresses."""
        for one in self._database.read(lambda c: amphorae.load_amphorae(c, load_balancer_id)):
            yield one.id, str(one.management_address)
