# SPDX-License-Identifier: Apache-2.0
"""Octavia may fail after our answer: what it has kept is what is wanted."""

import msgspec
import pytest
import sqlalchemy as sa
from octavia_sockets import OctaviaSockets

from amphora_driver import config
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.model.vocabulary import Algorithm, Kind, ListenerProtocol, PoolProtocol
from amphora_driver.provider_agent.audit import differences
from amphora_driver.provider_agent.reporter import Reporter
from amphora_driver.store import migrate, statuses, wanted
from amphora_driver.store.engine import Database
from amphora_driver.store.intents import Intents
from amphora_driver.store.tables import status, work

# octavia_lib leaves the socket of a refused connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
LISTENER = Listener(
    id="li", loadbalancer_id="lb", protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id="po"
)
MEMBER = Member(id="me", pool_id="po", address="192.0.2.1", protocol_port=80, weight=1)
POOL = Pool(
    id="po",
    loadbalancer_id="lb",
    protocol=PoolProtocol.HTTP,
    lb_algorithm=Algorithm.ROUND_ROBIN,
    members=(MEMBER,),
)
TREE = LoadBalancer(id="lb", project_id="demo", vip=VIP, listeners=(LISTENER,), pools=(POOL,))
KEPT_MEMBER = {"member_id": "me", "pool_id": "po", "address": "192.0.2.1", "protocol_port": 80, "weight": 1}


def kept(*members, name=""):
    pool = {
        "pool_id": "po",
        "loadbalancer_id": "lb",
        "protocol": "HTTP",
        "lb_algorithm": "ROUND_ROBIN",
        "members": list(members),
    }
    listener = {
        "listener_id": "li",
        "loadbalancer_id": "lb",
        "protocol": "HTTP",
        "protocol_port": 80,
        "default_pool_id": "po",
        "l7policies": [],
    }
    return {
        "loadbalancer_id": "lb",
        "project_id": "demo",
        "name": name,
        "vip_address": "198.51.100.10",
        "vip_subnet_id": "s1",
        "vip_network_id": "n1",
        "vip_port_id": "p1",
        "pools": [pool],
        "listeners": [listener],
    }


@pytest.fixture
def octavia(tmp_path):
    sockets = OctaviaSockets(tmp_path)
    sockets.trees["lb"] = kept(KEPT_MEMBER)
    sockets.start()
    yield sockets
    sockets.stop()


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[store]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n[queue]\ndoorbell_dir = {tmp_path}/bells\n"
        f"[octavia]\nstatus_socket = {tmp_path}/status.sock\nstats_socket = {tmp_path}/stats.sock\n"
        f"get_socket = {tmp_path}/get.sock\naudit_after = 0\naudit_interval = 0\n"
    )
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrate.upgrade(conf.store.connection)
    database = Database(conf.store.connection)
    yield database
    database.dispose()


@pytest.fixture
def intents(database):
    intents = Intents(database, lambda node: None)
    intents.create_load_balancer(TREE, read_back=False)
    return intents


@pytest.fixture
def reporter(conf, database, octavia, intents):
    reporter = Reporter(conf, database)
    reporter.turn()
    reporter.turn()
    return reporter


def row(database):
    return database.read(lambda c: c.execute(sa.select(work)).one())


def members(database):
    tree = database.read(lambda c: wanted.load_tree(c, "lb"))
    return {one.id: one.weight for one in tree.pools[0].members}


def serve(database):
    def write(connection):
        generation = row(database).generation
        connection.execute(work.update().values(applied=generation, dirty=False))
        statuses.confirm(connection, "lb", generation, {})

    database.write(write)


def test_what_octavia_has_kept_needs_nothing(database, reporter):
    assert (row(database).generation, row(database).committed) == (1, 1)


def test_a_member_that_was_rolled_back_is_not_wanted(intents, database, reporter, octavia):
    intents.create(Kind.MEMBER, msgspec.structs.replace(MEMBER, id="ghost", address="192.0.2.2"))
    serve(database)
    reporter.turn()
    assert members(database) == {"me": 1}
    assert (row(database).generation, row(database).committed, row(database).dirty) == (3, 3, True)
    assert "ghost" not in database.read(lambda c: c.execute(sa.select(status.c.object_id)).scalars().all())
    reporter.turn()
    assert row(database).generation == 3, "once"


def test_a_change_that_was_rolled_back_is_not_wanted(intents, database, reporter, octavia):
    intents.update(Kind.MEMBER, "me", {"weight": 7})
    reporter.turn()
    assert members(database) == {"me": 1}


def test_a_change_that_was_kept_stays(intents, database, reporter, octavia):
    octavia.trees["lb"] = kept({**KEPT_MEMBER, "weight": 7})
    intents.update(Kind.MEMBER, "me", {"weight": 7})
    reporter.turn()
    assert (members(database), row(database).generation) == ({"me": 7}, 2)


def test_what_is_being_deleted_is_still_there(intents, database, reporter, octavia):
    """Octavia shows it until it is told that it is gone, and does not say that it is going."""
    intents.delete(Kind.MEMBER, "me")
    reporter.turn()
    assert (members(database), row(database).generation) == ({}, 2)


def batch(intents, *members):
    made = [
        msgspec.structs.replace(MEMBER, id=one, address=f"192.0.2.{number}") for number, one in enumerate(members, 7)
    ]
    intents.set_members("po", [(one.id, lambda one=one: one, {}) for one in made])


def test_a_batch_that_was_rolled_back_takes_nothing_away(intents, database, reporter, octavia):
    batch(intents, "new")
    serve(database)
    octavia.statuses.clear()
    reporter.turn()
    assert members(database) == {"me": 1}
    assert "DELETED" not in str(octavia.statuses), "Octavia would forget the member, for good"
    assert row(database).dirty
    serve(database)
    reporter.turn()
    reporter.turn()
    assert "DELETED" not in str(octavia.statuses)
    assert (row(database).committed, members(database)) == (row(database).generation, {"me": 1})


def test_a_batch_that_was_kept(intents, database, reporter, octavia):
    new = {**KEPT_MEMBER, "member_id": "new", "address": "192.0.2.7"}
    # As it is when the first one is gone.
    octavia.trees["lb"], octavia.trees["new"] = kept(new), new
    batch(intents, "new")
    serve(database)
    reporter.turn()
    reporter.turn()
    assert (members(database), row(database).generation) == ({"new": 1}, 2)
    assert {"id": "me", "provisioning_status": "DELETED"} in octavia.statuses[-1]["members"]


def test_what_is_accepted_while_octavia_is_asked_is_not_lost(intents, database, reporter, octavia):
    intents.update(Kind.MEMBER, "me", {"weight": 7})
    asked = reporter.library.get_loadbalancer

    class Meanwhile:
        def __getattr__(self, name):
            return getattr(reporter.library, name)

        def get_loadbalancer(self, one):
            found = asked(one)
            intents.update(Kind.MEMBER, "me", {"weight": 9})
            return found

    library = Meanwhile()
    reporter._auditor._library = lambda: library
    reporter.turn()
    assert (members(database), row(database).generation) == ({"me": 9}, 3)


def test_one_that_changed_before_a_reporter_began_is_compared_too(conf, intents, database, reporter, octavia):
    intents.update(Kind.MEMBER, "me", {"weight": 7})
    database.write(lambda c: c.execute(work.update().values(committed=2)))
    database.write(lambda c: c.execute(sa.text("DELETE FROM duty")))
    another = Reporter(conf, database)
    another.turn()
    another.turn()
    assert members(database) == {"me": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"name": ""}, []),
        ({"profile": msgspec.structs.replace(TREE.profile, timeout_tunnel=5)}, []),
        ({"listeners": ()}, ["listener li is not there"]),
        ({"admin_state_up": False}, ["loadbalancer lb differs in admin_state_up"]),
        (
            {"pools": (msgspec.structs.replace(POOL, members=(msgspec.structs.replace(MEMBER, weight=3),)),)},
            ["member me differs in weight"],
        ),
        (
            {"pools": (msgspec.structs.replace(POOL, members=(MEMBER, msgspec.structs.replace(MEMBER, id="new"))),)},
            ["member new is there"],
        ),
    ],
)
def test_differences(change, said):
    assert differences(TREE, msgspec.structs.replace(TREE, **change), ()) == said


def test_the_order_of_names_makes_no_difference():
    one, other = (
        msgspec.structs.replace(TREE, listeners=(msgspec.structs.replace(LISTENER, sni_container_refs=refs),))
        for refs in (("a", "b"), ("b", "a"))
    )
    assert differences(one, other, ()) == []
