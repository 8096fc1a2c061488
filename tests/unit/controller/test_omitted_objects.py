# SPDX-License-Identifier: Apache-2.0
"""Omitted objects are reported even if one job finds the cause and another job reports success."""

import json

import pytest
from control import LB, LISTENER, TREE, FakeCloud, controlled

from amphora_driver.errors import AgentRefused, UnsupportedOption
from amphora_driver.model.enums import Algorithm, Kind, PoolProtocol
from amphora_driver.model.loadbalancer import Member, Pool


class RefusingCloud(FakeCloud):
    """A fake cloud that refuses the listener, has no VIP holder at first, and lacks one subnet."""

    def put_bundle(self, amphora_id, address, body, *, deadline=None):
        if f"frontend {LISTENER}" in (json.loads(body)["haproxy"] or ""):
            raise AgentRefused("apply it", "no such thing", status=422, object_id=LISTENER)
        answer = super().put_bundle(amphora_id, address, body, deadline=deadline)
        self.holder = None
        return answer

    def subnet(self, subnet_id, project_id=None):
        if subnet_id == "nowhere":
            raise UnsupportedOption("find it", "there is none")
        return super().subnet(subnet_id)


@pytest.fixture
def control(tmp_path):
    with controlled(tmp_path, RefusingCloud()) as control:
        yield control


def test_a_later_job_of_a_new_pair_reports_its_omitted_objects(control):
    pool = Pool(id="pool", loadbalancer_id=LB, protocol=PoolProtocol.HTTP, lb_algorithm=Algorithm.ROUND_ROBIN)
    member = Member(id="member", pool_id="pool", address="192.0.2.9", protocol_port=80, subnet_id="nowhere")
    control.recorder.create_load_balancer(TREE, read_back=False)
    control.recorder.create_object(Kind.POOL, pool)
    control.recorder.create_object(Kind.MEMBER, member)
    assert control.work() == 1, "no amphora has the VIPs yet"
    assert control.pending() == {LB, LISTENER, "pool", "member"}
    assert json.loads(control.row().omitted)["generation"] == control.row().generation

    control.cloud.holder = next(iter(control.cloud.machines))
    control.make_all_due()
    assert control.work() == 1
    said = control.provisioning()
    assert said == {LB: "ACTIVE", LISTENER: "ERROR", "pool": "ACTIVE", "member": "ERROR"}
    assert control.row().omitted is None
    assert not control.row().dirty


def test_omissions_of_an_older_generation_do_not_affect_the_next(control):
    control.recorder.create_load_balancer(TREE, read_back=False)
    control.work()
    control.cloud.put_bundle = lambda *args, **more: FakeCloud.put_bundle(control.cloud, *args, **more)
    control.recorder.update_object(Kind.LISTENER, LISTENER, {"connection_limit": 5})
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
