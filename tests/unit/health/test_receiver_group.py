# SPDX-License-Identifier: Apache-2.0
"""Several receivers on one port: real processes, real sockets and a real database."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import psutil
import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet
from free_ports import free_ports

from amphora_agent.stats import heartbeat_codec
from amphora_driver.database.tables import amphora_heartbeat, listener_statistics, object_status
from amphora_driver.database.tables_fleet import process as process_table
from amphora_driver.database.vault import Vault
from amphora_driver.errors import ConfigurationError
from amphora_driver.health import receiver_group
from amphora_driver.health.receiver import Receiver, bind_socket
from amphora_driver.health.receiver_group import ReceiverGroup, word_of
from amphora_driver.model.enums import ListenerProtocol, PoolProtocol
from amphora_driver.model.loadbalancer import Listener, LoadBalancer, Member, Pool, Vip
from amphora_driver.secret import Secret
from amphora_driver.store import amphorae
from amphora_driver.store.requests import RequestRecorder

EPOCH = 1_900_000_000_000_000_000
KEY = bytes(range(32))
VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")
RECEIVERS = 3
PAIRS = 6


def numbered(number):
    return uuid.UUID(int=1 << 100 | number)


def datagram(amphora_id, sequence, document=None):
    content = document or {"generation": 1, "listeners": {}, "pools": {}}
    (made,) = heartbeat_codec.datagrams(amphora_id, KEY, EPOCH, sequence, content)
    return made


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process):
    """Return whether a process has not ended. A process without a parent may stay a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- in one process --------------------------------------------------------------------------------------------


class Group:
    """Receivers in threads; `heard` has the amphorae that each one has accepted."""

    def __init__(self, number):
        self.group = ReceiverGroup(bind_socket, "127.0.0.1", 0, number)
        self.members = [self.group.member(index) for index in range(number)]
        self.heard = [[] for _ in self.members]
        self.receivers = [
            Receiver("127.0.0.1", 0, lambda _: {}, self.heard[index].append, member=one)
            for index, one in enumerate(self.members)
        ]
        for one in self.receivers:
            one.preload({str(numbered(each)): Secret(KEY) for each in range(30)})
        self.threads = [threading.Thread(target=one.run) for one in self.receivers]
        for one in self.threads:
            one.start()

    def close(self):
        for one in self.receivers:
            one.stop()
        for one in self.threads:
            one.join()
        self.group.close()

    def send(self, *datagrams):
        # Each amphora has its own address, as in a network.
        for one in datagrams:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(one, ("127.0.0.1", self.group.port))

    def ids(self):
        return [{one.amphora_id for one in each} for each in self.heard]


@pytest.fixture
def group():
    made = Group(RECEIVERS)
    yield made
    made.close()


def test_the_kernel_distributes_heartbeats_by_amphora(group):
    everyone = [numbered(each) for each in range(30)]
    for sequence in (1, 2):
        group.send(*(datagram(one, sequence) for one in everyone))
    until(lambda: sum(map(len, group.heard)) == 60)
    expected = [{str(one) for one in everyone if word_of(str(one)) % RECEIVERS == index} for index in range(RECEIVERS)]
    assert group.ids() == expected
    assert all(expected)


def test_both_amphorae_of_a_pair_have_one_receiver(group):
    pairs = [(str(numbered(each)), f"lb{each // 2}") for each in range(30)]
    moved = []
    for one in group.members:
        one.distribute(pairs, moved.append)
    assert sorted(each for some in moved for each in some) == sorted(one for one, _ in pairs)
    group.send(*(datagram(numbered(each), 1) for each in range(30)))
    until(lambda: sum(map(len, group.heard)) == 30)
    owners = {one: index for index, ids in enumerate(group.ids()) for one in ids}
    for each in range(0, 30, 2):
        assert owners[str(numbered(each))] == owners[str(numbered(each + 1))] == each % RECEIVERS


def test_a_new_amphora_does_not_move_its_load_balancer_and_a_moved_one_is_announced(group):
    first, second, third = (str(numbered(each)) for each in (0, 1, 2))
    moved = []
    member = group.members[1]
    member.distribute([(first, "lb"), (second, "lb")], moved.append)
    assert (moved.pop(), member.owner(second)) == ([], 0)
    member.distribute([(first, "lb"), (second, "lb"), (third, "lb")], moved.append)
    assert (moved.pop(), member.owner(third)) == ([], 0)
    member.distribute([(second, "lb"), (third, "lb")], moved.append)
    assert moved.pop() == [second, third]
    assert {member.owner(one) for one in (second, third)} == {1}


def test_a_probe_reaches_its_own_receiver(group):
    for _ in range(5):
        assert all(one.receives_probe(10.0) for one in group.receivers)


def test_the_self_test_fails_if_forwarded_datagrams_are_lost(group):
    # A connected socket receives only from its peer, so the kernel drops what the receivers forward to it.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        group.members[1].forwarded.connect(peer.getsockname())
        assert [one.receives_probe(0.5) for one in group.receivers] == [True, False, True]


def test_only_the_sockets_for_amphorae_share_a_port(group):
    sockets = [[one.receiving for one in group.members], [one.forwarded for one in group.members]]
    shared = [{one.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) for one in some} for some in sockets]
    assert shared == [{1}, {0}]
    assert [len({one.getsockname() for one in some}) for some in sockets] == [1, RECEIVERS]


def test_short_and_unknown_datagrams_are_refused(group):
    group.send(b"", b"AHB1", datagram(uuid.UUID(int=77), 1))
    until(lambda: sum(sum(one.refused.values()) for one in group.receivers) == 3)
    assert sum(one.refused["short"] for one in group.receivers) == 2


def test_a_second_group_does_not_share_the_port_of_the_first_one(group):
    with pytest.raises(ConfigurationError, match="in use"):
        ReceiverGroup(bind_socket, "127.0.0.1", group.group.port, RECEIVERS)
    assert all(one.receives_probe(10.0) for one in group.receivers)


def test_the_self_test_fails_if_that_of_another_receiver_is_old(group, monkeypatch):
    now, (one, *others) = [1000.0], group.members
    monkeypatch.setattr(receiver_group, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one.record_test()
    assert not one.all_tested(5.0)
    for each in others:
        each.record_test()
    assert one.all_tested(5.0)
    now[0] += 5.5
    assert not one.all_tested(5.0)
    one.record_test()
    assert not one.all_tested(5.0), "the tests of the others are old"


# --- processes -------------------------------------------------------------------------------------------------


class Deployment:
    """A health manager with several receivers, and pairs of amphorae."""

    def __init__(self, folder, database):
        self.database = database
        (folder / "key").write_bytes(Fernet.generate_key())
        (folder / "key").chmod(0o600)
        vault = Vault.load(str(folder / "key"))
        recorder = RequestRecorder(database, lambda node: None)
        self.ids = [numbered(each) for each in range(2 * PAIRS)]
        for each in range(PAIRS):
            recorder.create_load_balancer(tree(each), read_back=False)
        for number, one in enumerate(self.ids):
            sealed = vault.seal(Secret(KEY), amphorae.key_location(str(one)))
            database.write(
                lambda c, one=one, sealed=sealed, number=number: amphorae.insert_amphora(
                    c, str(one), f"lb{number // 2}", "standalone", sealed
                )
            )
        (self.port,) = free_ports(1)
        (folder / "driver.conf").write_text(
            f"[amp_database]\nconnection = {database.url}\nencryption_key_file = {folder}/key\n"
            f"[amp_queue]\nsocket_dir = {folder}/bells\n[amp_status_page]\nhealth_bind_port = 0\n"
            f"[amp_health]\nbind_address = 127.0.0.1\nbind_port = {self.port}\nreceivers = {RECEIVERS}\n"
            "statistics_interval = 0.1\n"
        )
        self.folder, self.log = folder, folder / "log"
        self.start()
        self.sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "amphora_driver.health.service"],
                env={**os.environ, "AMPHORA_DRIVER_CONFIG": str(self.folder / "driver.conf")},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def close(self):
        for one in self.workers():
            one.resume()
        self.process.terminate()
        self.process.wait(30)
        self.sender.close()

    def workers(self):
        return psutil.Process(self.process.pid).children()

    def send(self, sequence):
        """Send a heartbeat of each amphora. The first one of each pair has the VIPs, and reaches all members."""
        for number, one in enumerate(self.ids):
            holder = number % 2 == 0
            document = {
                "generation": 1,
                "holds_vip": holder,
                "listeners": {f"li{number // 2}": {"status": "OPEN", "bytes_in": sequence}},
                "pools": {
                    f"po{number // 2}:li{number // 2}": {
                        "status": "UP",
                        "members": {f"me{number // 2}": "UP" if holder else "DOWN"},
                    }
                },
            }
            self.sender.sendto(datagram(one, sequence, document), ("127.0.0.1", self.port))

    def column(self, key, column):
        return list(self.database.read(lambda c: c.execute(sa.select(key, column)).tuples().all()))

    def sequences(self):
        return {value for _, value in self.column(amphora_heartbeat.c.amphora_id, amphora_heartbeat.c.sequence)}

    def beats(self):
        return dict(self.column(process_table.c.name, process_table.c.beat))

    def tested_at(self):
        """Return the time of the last self-test of each receiver, also of a failed one."""
        return dict(self.column(process_table.c.name, process_table.c.seen_at))

    def count_failed_tests(self):
        return self.log.read_text().count("the self-test of the health manager failed")

    def wait_until_working(self):
        """Wait until the self-tests of all receivers have succeeded, so that no heartbeat gets lost."""
        until(lambda: len(self.beats()) == RECEIVERS and min(self.beats().values()) > 0, 40)


def tree(number):
    lb, pool = f"lb{number}", f"po{number}"
    member = Member(id=f"me{number}", pool_id=pool, address="192.0.2.1", protocol_port=80)
    listener = Listener(
        id=f"li{number}", loadbalancer_id=lb, protocol=ListenerProtocol.HTTP, protocol_port=80, default_pool_id=pool
    )
    pools = (Pool(id=pool, loadbalancer_id=lb, protocol=PoolProtocol.HTTP, members=(member,)),)
    return LoadBalancer(id=lb, project_id="demo", vip=VIP, listeners=(listener,), pools=pools)


@pytest.fixture
def deployment(tmp_path, database):
    made = Deployment(tmp_path, database)
    yield made
    made.close()


def test_a_killed_receiver_loses_and_doubles_no_count(deployment):
    deployment.wait_until_working()
    deployment.send(1)
    until(
        lambda: len(deployment.column(listener_statistics.c.listener_id, listener_statistics.c.bytes_in)) == 2 * PAIRS
    )
    before = deployment.workers()
    assert len(before) == RECEIVERS
    before[1].kill()
    # These datagrams wait for the next process.
    deployment.send(1001)
    until(lambda: len(deployment.workers()) == RECEIVERS and before[1] not in deployment.workers())
    until(lambda: deployment.sequences() == {1001})
    until(
        lambda: (
            {value for _, value in deployment.column(listener_statistics.c.amphora_id, listener_statistics.c.bytes_in)}
            == {1001}
        )
    )
    statuses = dict(deployment.column(object_status.c.object_id, object_status.c.operating))
    assert {statuses[f"me{each}"] for each in range(PAIRS)} == {"ONLINE"}, "the standby's report does not count"


def test_if_one_receiver_hangs_no_self_test_succeeds(deployment):
    deployment.wait_until_working()
    failed = deployment.count_failed_tests()
    deployment.workers()[0].suspend()
    # The tests that have begun may still succeed.
    until(lambda: deployment.count_failed_tests() == failed + RECEIVERS - 1)
    assert deployment.log.read_text().rstrip().endswith("a receiver on this host did not receive its probe")
    before, failures = deployment.beats(), deployment.tested_at()

    def have_failed_again():
        return sum(at > failures[name] for name, at in deployment.tested_at().items()) == RECEIVERS - 1

    for _ in range(2):
        until(have_failed_again)
        assert deployment.beats() == before
        failures = deployment.tested_at()
    deployment.workers()[0].send_signal(signal.SIGCONT)
    until(lambda: all(beat > before[name] for name, beat in deployment.beats().items()))


def test_after_the_death_of_their_parent_all_receivers_end_and_others_start(deployment):
    deployment.wait_until_working()
    before = deployment.workers()
    deployment.process.kill()
    deployment.process.wait()
    until(lambda: not any(map(is_alive, before)), 40)
    assert deployment.beats() == {}, "each receiver has written its reports and deleted its row"
    deployment.start()
    deployment.wait_until_working()
