# SPDX-License-Identifier: Apache-2.0
"""The sender of notifications: repetition after a crash, outages of the message bus, age limit, duty."""

import json
import os
import signal
import threading
from types import SimpleNamespace

import migrated
import pytest
import sqlalchemy as sa

from amphora_driver import config, metrics
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import notification
from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.maintenance import notification_sender as module
from amphora_driver.maintenance.notification_sender import NotificationSender, create_duties
from amphora_driver.model.enums import Kind
from amphora_driver.model.loadbalancer import LoadBalancer, Vip
from amphora_driver.notifications import outbox
from amphora_driver.store.requests import RequestRecorder

VIP = Vip(address="198.51.100.10", subnet_id="s1", network_id="n1", port_id="p1")


class Bus:
    """Collects messages, or fails."""

    def __init__(self):
        self.sent, self.attempts, self.closed = [], 0, 0
        self.on_publish = lambda message: None

    def publish(self, message):
        self.attempts += 1
        self.on_publish(message)
        self.sent.append(json.loads(message["oslo.message"]))

    def close(self):
        self.closed += 1

    discard = close

    def names(self):
        return [one["payload"]["loadbalancer_id"] for one in self.sent]


def fail(_message):
    raise ConnectionRefusedError("amqp://user:password@bus")


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = sqlite:///{tmp_path}/driver.sqlite\n[amp_queue]\npoll_interval = 0.01\n"
        "[amp_notifications]\nenabled = true\nmax_age = 60\n"
    )
    return config.load([str(path)])


@pytest.fixture
def database(conf):
    migrated.write(conf.amp_database.connection)
    database = Database(conf.amp_database.connection)
    yield database
    database.dispose()


@pytest.fixture
def clock(monkeypatch):
    """The sender's own clock; the test moves it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.fixture
def bus():
    return Bus()


@pytest.fixture
def sender(conf, database, bus, clock):
    return NotificationSender(conf, database, "me", bus)


@pytest.fixture
def announced(database):
    """Records a number of due notifications."""
    recorder = RequestRecorder(database, lambda node: None, announce=outbox.announce)

    def announce(*names):
        for one in names:
            recorder.create_load_balancer(LoadBalancer(id=one, project_id="demo", vip=VIP), read_back=False)
        database.write(lambda connection: outbox.release(connection, dict.fromkeys(names, 1)))

    return announce


def left(database):
    return len(database.read(lambda connection: outbox.list_due(connection, 1000)))


def counted(result):
    return metrics.OURS.notifications.labels(result)._value.get()


def test_notifications_are_sent_in_order_and_deleted(sender, bus, announced, database):
    names = [f"lb{one:03}" for one in range(2 * module._MOST_AT_ONCE + 1)]
    announced(*names)
    before = counted("sent")
    sender.send_due()
    assert bus.names() == names
    assert left(database) == 0
    assert counted("sent") - before == len(names)
    assert bus.closed == 1, "an idle sender has no connection"
    sender.send_due()
    assert len(bus.sent) == len(names), "each one is sent once"


def test_a_crash_after_the_confirmation_repeats_the_same_message(sender, bus, announced, database, monkeypatch, conf):
    announced("lb")
    with monkeypatch.context() as crash:
        crash.setattr(outbox, "delete", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sender.send_due()
    NotificationSender(conf, database, "me", bus).send_due()
    first, second = bus.sent
    assert first == second
    assert left(database) == 0


def test_a_killed_sender_loses_nothing(bus, announced, database, conf):
    announced("one", "two")
    if (pid := os.fork()) == 0:
        bus.on_publish = lambda message: bus.sent and os.kill(os.getpid(), signal.SIGKILL)
        NotificationSender(conf, Database(conf.amp_database.connection), "me", bus).send_due()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert left(database) == 2
    NotificationSender(conf, database, "me", bus).send_due()
    assert bus.names() == ["one", "two"]
    assert left(database) == 0


def test_an_outage_costs_one_attempt_per_back_off(sender, bus, announced, database, clock, caplog):
    announced("one", "two")
    bus.on_publish = fail
    failed = counted("failed")
    pauses = []
    for _ in range(9):
        attempts = bus.attempts
        sender.send_due()
        sender.send_due()
        assert bus.attempts == attempts + 1
        pauses.append(sender._retry_at - clock.seconds)
        clock.seconds = sender._retry_at
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert counted("failed") - failed == 9
    assert left(database) == 2
    assert "ConnectionRefusedError" in caplog.text
    assert "password" not in caplog.text
    bus.on_publish = lambda message: None
    sender.send_due()
    assert bus.names() == ["one", "two"]
    announced("three")
    bus.on_publish = fail
    sender.send_due()
    assert sender._retry_at - clock.seconds == 1, "the back-off begins again"


def test_the_messages_before_an_error_are_not_repeated(sender, bus, announced, database, clock):
    announced("one", "two", "three")
    bus.on_publish = lambda message: '"two"' in message["oslo.message"] and fail(message)
    sender.send_due()
    assert bus.names() == ["one"]
    assert left(database) == 2
    bus.on_publish = lambda message: None
    clock.seconds += 2
    sender.send_due()
    assert bus.names() == ["one", "two", "three"]


def test_a_slow_message_bus_does_not_outlast_the_lease(sender, bus, announced, database, clock):
    def slow(_message):
        assert clock.seconds < sender._held_until + module._DUTY_SECONDS / 2, "the lease is valid"
        clock.seconds += 2.9

    announced(*(f"lb{one}" for one in range(40)))
    bus.on_publish = slow
    sender.send_due()
    assert left(database) == 0


def test_old_notifications_are_dropped_and_counted(sender, bus, announced, database, clock, caplog):
    announced("old", "older")
    bus.on_publish = fail
    sender.send_due()
    database.write(lambda c: c.execute(notification.update().values(ready_at=notification.c.ready_at - 61)))
    announced("young")
    dropped = counted("dropped")
    sender.send_due()
    assert left(database) == 3, "the sender looks once a minute"
    clock.seconds += module._PURGE_INTERVAL
    bus.on_publish = lambda message: None
    sender.send_due()
    assert counted("dropped") - dropped == 2
    assert bus.names() == ["young"]
    assert "dropped 2 notifications, because no controller could send them for 60 s" in caplog.text


def test_no_notification_is_dropped_after_a_jump_of_the_database_clock(sender, announced, database, monkeypatch, bus):
    announced("lb")
    database.write(lambda c: c.execute(notification.update().values(ready_at=1.0)))
    monkeypatch.setattr(database, "seconds_since_clock_jump", lambda: 59.0)
    sender.send_due()
    assert bus.names() == ["lb"]


def test_one_controller_sends_and_another_takes_over(sender, bus, announced, database, clock, conf):
    another = NotificationSender(conf, database, "another", bus)
    sender.send_due()
    announced("one")
    another.send_due()
    assert bus.sent == []
    sender.send_due()
    assert bus.names() == ["one"]
    announced("two")
    sender.release()
    another.send_due()
    assert bus.names() == ["one"], "it tries again after some seconds"
    clock.seconds += module._ACQUIRE_INTERVAL
    another.send_due()
    assert bus.names() == ["one", "two"]
    sender.send_due()
    announced("three")
    sender.send_due()
    assert bus.names() == ["one", "two"], "the duty has moved"


def test_a_holder_without_work_writes_nothing_between_two_renewals(sender, database, clock):
    sender.send_due()
    statements = []
    sa.event.listen(database.engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    sender.send_due()
    assert [one for one in statements if not one.startswith(("SELECT", "PRAGMA", "BEGIN DEFERRED"))] == []
    clock.seconds += module._DUTY_SECONDS / 2
    sender.send_due()
    assert [one for one in statements if one.startswith("UPDATE duty")]


def test_the_thread_ends_while_the_message_bus_fails(conf, database, bus, announced):
    announced("lb")
    bus.on_publish = fail
    stopping, draining, tried = threading.Event(), threading.Event(), threading.Event()
    bus.on_publish = lambda message: tried.set() or fail(message)
    thread = threading.Thread(target=NotificationSender(conf, database, "me", bus).run, args=(stopping, draining))
    thread.start()
    assert tried.wait(20)
    stopping.set()
    thread.join(20)
    assert not thread.is_alive()
    assert left(database) == 1


def test_an_unreachable_database_leaves_the_thread_alive(conf, database, bus, announced, monkeypatch):
    announced("lb")
    stopping, sent = threading.Event(), threading.Event()
    bus.on_publish = lambda message: sent.set()
    fails = [StoreError("read from the database", "it is gone")] * 2

    def read(connection, limit, real=outbox.list_due):
        if fails:
            raise fails.pop()
        return real(connection, limit)

    monkeypatch.setattr(outbox, "list_due", read)
    sender = NotificationSender(conf, database, "me", bus)
    thread = threading.Thread(target=sender.run, args=(stopping, threading.Event()))
    thread.start()
    assert sent.wait(20)
    stopping.set()
    thread.join(20)
    assert bus.names() == ["lb"]


def test_a_controller_has_the_duty_only_with_notifications(conf, database):
    with pytest.raises(ConfigurationError, match=r"\[amp_notifications\] url is not set"):
        create_duties(conf, database, "me")
    conf.set_override("url", "amqp://bus.example//;amqp://other.example//", "amp_notifications")
    assert list(create_duties(conf, database, "me")) == ["notifications"]
    conf.set_override("enabled", False, "amp_notifications")
    assert create_duties(conf, database, "me") == {}


def test_an_update_in_between_is_sent_too(sender, bus, announced, database):
    announced("lb")
    recorder = RequestRecorder(database, lambda node: None, announce=outbox.announce)
    recorder.update_object(Kind.LOAD_BALANCER, "lb", {"name": "new"})
    database.write(lambda connection: outbox.release(connection, {"lb": 2}))
    sender.send_due()
    assert [one["event_type"].split(".")[2] for one in bus.sent] == ["create", "update"]
    assert [one["payload"]["name"] for one in bus.sent] == [None, "new"]
