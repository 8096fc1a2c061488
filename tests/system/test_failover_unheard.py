# SPDX-License-Identifier: Apache-2.0
"""A requested fail-over after an unrecorded VIP takeover cuts no connection.

The VIPs move to the standby while no health manager runs, so the database still records the old holder.
"""

from contextlib import closing

import long_connections
import pytest
from amphoractl import Amphoractl

from amphora_driver import config
from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.database.vault import Vault
from amphora_driver.host import namespaces
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.store import amphorae

pytestmark = pytest.mark.root


@pytest.fixture
def balancer(cloud, flavor):
    """A pair whose heartbeats arrive, with a listener for long connections."""
    pool = {"name": "lasting", "protocol": "HTTP", "lb_algorithm": "ROUND_ROBIN"}
    pool["members"] = [cloud.member("member3", protocol_port=9000)]
    listener = {"name": "lasting", "protocol": "HTTP", "protocol_port": 81, "default_pool": pool}
    pairs = flavor("unheard", {"loadbalancer_topology": "ACTIVE_STANDBY", "vrrp_advert_interval": 0.5})
    made = cloud.load_balancer("unheard", flavor_id=pairs.id, listeners=[listener])
    cloud.until(
        lambda: {one.holds_vip for one in pair(cloud, made).values()} == {True, False}, "both amphorae send heartbeats"
    )
    return made


def pair(cloud, balancer):
    """Return the load balancer's amphorae by role."""
    found = cloud.database.read(lambda c: amphorae.load_amphorae(c, balancer.id))
    return {one.role: one for one in found if one.state is not AmphoraState.RETIRING}


def replacements(cloud, balancer, former):
    """Return the replacement with the role of the replaced amphora."""
    return [one for role, one in pair(cloud, balancer).items() if role == former.role and one.id != former.id]


@pytest.fixture
def agents(settings, database):
    """Call an agent as a controller does."""
    conf = config.load([str(settings.driver_configuration)])

    def ask(question):
        def go():
            trust = TrustStore(conf, database, Vault.load(conf.amp_database.encryption_key_file))
            with closing(AgentClient(conf, trust)) as client:
                return question(client)

        return namespaces.run_inside(namespaces.path(settings.control), go)

    return ask


@pytest.fixture
def no_health_manager(stack):
    """Stop the health manager."""
    stack.supervision.stop("amphora-health-manager")
    yield
    stack.up()


def test_failover_after_an_unrecorded_vip_takeover(cloud, settings, balancer, agents, request):
    stays, goes = sorted(pair(cloud, balancer).values(), key=lambda one: not one.holds_vip)

    def says(one):
        return agents(lambda client: client.vrrp(one.id, one.management_address))

    with long_connections.Member(cloud.settings, "member3", 9000) as member:
        request.getfixturevalue("no_health_manager")
        agents(lambda client: client.release_vips(stays.id, stays.management_address, 0.0))
        cloud.until(lambda: says(goes).holds_vip, "the standby takes the VIPs")
        assert says(stays).holds_vip is False
        visits = member.visits(settings, balancer.vip_address, 81)
        assert pair(cloud, balancer)[stays.role].holds_vip, "the database records the old holder"

        status, _, said = Amphoractl(settings).run("amphora", "failover", goes.id)
        assert status == 0, said
        cloud.until(lambda: any(one.confirmed for one in replacements(cloud, balancer, goes)), "the replacement serves")
        for visit in visits:
            visit.goes_on()
        assert says(goes).draining > 0
        assert says(stays).holds_vip
        member.finish()
        assert visits[0].rest() == member.sent
        for visit in visits[1:]:
            visit.close()
    cloud.until(lambda: goes.id not in cloud.amphorae(balancer), "the amphora is deleted after its last connection")
