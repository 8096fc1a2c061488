# SPDX-License-Identifier: Apache-2.0
"""The seven scenarios of the load-balancing policy with a stub of Nova, with two providers.

The servers are the member hosts of the sandbox. The second provider has no data plane, and its scenarios no traffic.
`tests/openstack/test_cluster_scenarios.py` has a real Nova.
"""

import cluster_scenarios
import pytest

pytestmark = [pytest.mark.root, pytest.mark.lasts(300)]


def test_no_request_fails_in_any_scenario(served):
    cluster, web, first = served(minimum=1)
    cluster_scenarios.no_request_fails(web, cluster, first)


@pytest.mark.extended
def test_the_scenarios_with_another_provider(served, other_provider):
    cluster, web, first = served("noop_driver", minimum=1)
    cluster_scenarios.run_scenarios(web, cluster, first)
    web.deleted()
