# SPDX-License-Identifier: Apache-2.0
"""What is not served is told, whichever turn finds it and whichever says that the rest is served."""

import json

import pytest
from test_reconcile_pairs import LB, LISTENER, TREE, Control, World

from amphora_driver import config
from amphora_driver.errors import AgentRefused, UnsupportedOption
from amphora_driver.model.loadbalancer import Member, Pool
from amphora_driver.model.vocabulary import Algorithm, Kind, PoolProtocol
from amphora_driver.store import migrate
from amphora_driver.store.engine import Database


class Picky(World):
    """Its agents refuse the listener; nobody has the VIPs before the test says so; one subnet does not exist."""

    def put_bundle(self, amphora_id, address, body, *, deadline=None):
        if f"frontend {LISTENER}" in (json.loads(body)["haproxy"] or ""):
            raise AgentRefused("apply it", "no such thing", status=422, object_id=LISTENER)
        answer = super().put_bundle(amphora_id, address, body, deadline=deadline)
        self.holder = None
        return answer

    def subnet(self, subnet_id):
        if subnet_id == "nowhere":
            raise UnsupportedOption("find it", "there is none")
        return super().subnet(subnet_id)


@pytest.fixture
def control(tmp_path):
    for name in ("client_ca.pem", "ca.pem"):
        (tmp_path / name).write_text("authority")
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n"
        f"[certificates]\nclient_ca = {tmp_path}/client_ca.pem\nca_certificate = {tmp_path}/ca.pem\n"
    )
    conf = config.load([str(path)])
    migrate.upgrade(conf.store.connection)
    database = Database(conf.store.connection)
    yield Control(conf, database, Picky())
    database.dispose()


def test_a_pair_that_begins_says_in_a_later_turn_what_it_does_not_serve(control):
    pool = Pool(id="pool", loadbalancer_id=LB, protocol=PoolProtocol.HTTP, lb_algorithm=Algorithm.ROUND_ROBIN)
    member = Member(id="member", pool_id="pool", address="192.0.2.9", protocol_port=80, subnet_id="nowhere")
    control.intents.create_load_balancer(TREE, read_back=False)
    control.intents.create(Kind.POOL, pool)
    control.intents.create(Kind.MEMBER, member)
    assert control.work() == 1, "nobody has the VIPs yet"
    assert control.pending() == {LB, LISTENER, "pool", "member"}
    assert json.loads(control.row().left_out)["generation"] == control.row().generation

    control.world.holder = next(iter(control.world.machines))
    control.hurry()
    assert control.work() == 1
    said = control.provisioning()
    assert said == {LB: "ACTIVE", LISTENER: "ERROR", "pool": "ACTIVE", "member": "ERROR"}
    assert control.row().left_out is None
    assert not control.row().dirty


def test_what_was_left_out_of_an_older_generation_is_not_held_against_the_next(control):
    control.intents.create_load_balancer(TREE, read_back=False)
    control.work()
    control.world.put_bundle = lambda *args, **more: World.put_bundle(control.world, *args, **more)
    control.intents.update(Kind.LISTENER, LISTENER, {"connection_limit": 5})
    control.work()
    assert control.provisioning() == {LB: "ACTIVE", LISTENER: "ACTIVE"}
