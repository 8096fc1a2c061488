# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova`: interfaces, removal and lists of servers."""

import time

import pytest
from nova_answers import (
    AMPHORA,
    CREATED,
    FIND,
    GONE,
    NOTHING,
    TAGS,
    boot_request,
    delete,
    failed,
    listed,
    port,
    refused,
    server,
)

from amphora_driver.compute.interface import Location
from amphora_driver.deadline import Deadline, apply_deadline
from amphora_driver.errors import ComputeError, DeadlinePassed

PATH = "/servers/server-1/os-interface"
ACTIVE = {"port_id": "vip-port", "port_state": "ACTIVE"}


class TestAttach:
    def made(self, make_nova, *answers):
        return make_nova((FIND, listed(server())), *answers)

    def test_it_takes_two_requests(self, make_nova):
        made = self.made(make_nova, (f"POST {PATH}", {"interfaceAttachment": ACTIVE}))
        made.attach(AMPHORA, port())
        assert made.script.bodies == [{"interfaceAttachment": {"port_id": "vip-port"}}]
        assert len(made.script.requests) == 2

    def test_an_attached_port_is_fine(self, make_nova):
        made = self.made(
            make_nova,
            (f"POST {PATH}", refused(409, "Port vip-port is still in use.")),
            (f"GET {PATH}/vip-port", {"interfaceAttachment": ACTIVE}),
        )
        made.attach(AMPHORA, port())
        assert made.script.finished()

    def test_a_port_of_another_server_is_an_error(self, make_nova):
        made = self.made(
            make_nova,
            (f"POST {PATH}", refused(409, "Port vip-port is still in use.")),
            (f"GET {PATH}/vip-port", GONE),
        )
        with pytest.raises(ComputeError, match="still in use") as caught:
            made.attach(AMPHORA, port())
        assert not caught.value.final

    @pytest.mark.parametrize(
        ("found", "named"),
        [
            (NOTHING, "does not exist"),
            (listed(server(status="BUILD")), "status BUILD"),
            (listed(failed(message="Disk error")), "status ERROR .*Disk error"),
            (listed(server(**{"OS-EXT-STS:task_state": "deleting"})), "is deleting"),
        ],
    )
    def test_a_server_that_does_not_run_is_an_error_with_its_state(self, make_nova, found, named):
        made = make_nova((FIND, found))
        with pytest.raises(ComputeError, match=named):
            made.attach(AMPHORA, port())
        assert made.script.bodies == []

    def test_it_waits_for_the_port(self, make_nova):
        down = {"interfaceAttachment": {**ACTIVE, "port_state": "DOWN"}}
        made = self.made(
            make_nova,
            (f"POST {PATH}", down),
            (f"GET {PATH}/vip-port", {"interfaceAttachment": ACTIVE}),
        )
        made.attach(AMPHORA, port())
        assert len(made.script.requests) == 3

    def test_a_port_that_stays_down_delays_it_for_a_short_time(self, make_nova, monkeypatch, caplog):
        monkeypatch.setattr("amphora_driver.compute.nova._ACTIVE_SECONDS", 0.3)
        down = {"interfaceAttachment": {**ACTIVE, "port_state": "DOWN"}}
        made = self.made(make_nova, (f"POST {PATH}", down), (f"GET {PATH}/vip-port", down))
        made.attach(AMPHORA, port())
        assert "has state DOWN" in caplog.text


class TestDetach:
    @pytest.mark.parametrize(
        "answers", [[(FIND, NOTHING)], [(FIND, listed(server())), (f"DELETE {PATH}/vip-port", GONE)]]
    )
    def test_an_absent_interface_is_fine(self, make_nova, answers):
        made = make_nova(*answers)
        made.detach(AMPHORA, port())
        assert made.script.finished()

    def test_it_waits_for_the_end(self, make_nova):
        made = make_nova(
            (FIND, listed(server())),
            (f"DELETE {PATH}/vip-port", None),
            (f"GET {PATH}/vip-port", {"interfaceAttachment": ACTIVE}),
            (f"GET {PATH}/vip-port", GONE),
        )
        made.detach(AMPHORA, port())
        assert made.script.requests[-2:] == [f"GET {PATH}/vip-port"] * 2

    def test_a_slow_one_is_repeated_by_the_next_job(self, make_nova):
        made = make_nova(
            (FIND, listed(server())),
            (f"DELETE {PATH}/vip-port", None),
            (f"GET {PATH}/vip-port", {"interfaceAttachment": ACTIVE}),
        )
        with pytest.raises(ComputeError, match="has not detached") as caught:
            made.detach(AMPHORA, port())
        assert not caught.value.final


class TestDestroy:
    def test_all_servers_and_then_the_ports(self, make_nova):
        made = make_nova(*CREATED, (FIND, listed(server("a"), failed("b"))), (delete("a"), None), (delete("b"), GONE),
                         (FIND, listed(server("a"))), (FIND, NOTHING))  # fmt: skip
        made.boot(boot_request())
        made.destroy(AMPHORA)
        assert made.script.requests[3:] == [FIND, delete("a"), delete("b"), FIND, FIND]
        assert made.ports.deleted == ["port-management"]

    def test_nothing(self, make_nova):
        made = make_nova((FIND, NOTHING))
        made.destroy(AMPHORA)
        assert made.script.requests == [FIND]

    def test_the_ports_stay_while_a_server_exists(self, make_nova):
        made = make_nova(*CREATED, (FIND, listed(server())), (delete("server-1"), None), (FIND, listed(server())))
        made.boot(boot_request())
        with pytest.raises(ComputeError, match=r"still being deleted: server-1 \(ACTIVE\)") as caught:
            made.destroy(AMPHORA)
        assert (caught.value.final, made.ports.deleted) == (False, [])

    def test_a_server_that_appears_late_is_deleted_too(self, make_nova):
        made = make_nova(
            (FIND, listed(server("a"))), (delete("a"), None), (FIND, listed(server("b"))), (delete("b"), None),
            (FIND, NOTHING),
        )  # fmt: skip
        made.destroy(AMPHORA)
        assert delete("b") in made.script.requests

    def test_a_foreign_server_is_not_touched(self, make_nova):
        made = make_nova((FIND, listed(server(tags=["amphora-deployment:two", TAGS[1]]))))
        made.destroy(AMPHORA)
        assert made.script.requests == [FIND]

    def test_the_wait_ends_at_the_deadline_of_the_job(self, make_nova):
        made = make_nova(
            (FIND, listed(server())), (delete("server-1"), None), (FIND, listed(server())), deletion_timeout=60
        )
        began = time.monotonic()
        with apply_deadline(Deadline(0.2, "finish")), pytest.raises((ComputeError, DeadlinePassed)):
            made.destroy(AMPHORA)
        assert time.monotonic() - began < 30


class TestLists:
    def test_machines_are_read_in_pages_without_details(self, make_nova):
        other = AMPHORA.replace("0", "1")
        one = {"id": "a", "name": f"octavia-amphora-{AMPHORA}"}
        more = [{"id": "b", "name": f"former-prefix-{other}"}, {"id": "c", "name": "renamed"}]
        page = f"GET /servers?tags={TAGS[0]}&limit=2"
        made = make_nova(
            (page, {"servers": [one], "servers_links": [{"rel": "next"}]}),
            (f"{page}&marker=a", {"servers": more}),
            page_size=2,
        )
        assert made.machines() == {AMPHORA, other}
        assert made.script.finished()

    def test_a_list_begins_again_if_the_last_server_of_a_page_is_deleted(self, make_nova):
        other = "0b8f7a54-3f1e-4c59-8f5d-7f1f0a9d2c02"
        page = f"GET /servers?tags={TAGS[0]}&limit=1000"
        first = {"servers": [{"id": "1", "name": f"x-{AMPHORA}"}], "servers_links": [{"rel": "next"}]}
        gone = f"{page}&marker=1", refused(400, "marker [1] not found")
        made = make_nova((page, first), gone, (page, listed({"id": "2", "name": f"x-{other}"})))
        assert made.machines() == {other}
        made.script.continue_with(*[(page, first), gone] * 4)
        with pytest.raises(ComputeError, match="not found"):
            made.machines()
        assert made.script.finished()

    def test_locations(self, make_nova):
        found = [
            server("a"),
            failed("b", created="2026-11-24T09:00:00Z"),
            server("c", tags=[TAGS[0], "amphora:other"], hostId="hash-2", **{"OS-EXT-AZ:availability_zone": ""}),
            server("d", tags=[TAGS[0]]),
            server("e", tags=["amphora:foreign"]),
        ]
        made = make_nova((f"GET /servers/detail?tags={TAGS[0]}&limit=1000", listed(*found)))
        assert made.locations() == {
            AMPHORA: Location(host="hash-1", zone="az1"),
            "other": Location(host="hash-2", zone=None),
        }

    def test_host_names(self, make_nova):
        # echo -n projectnode-1 | sha224sum
        assert make_nova().host_names("node-1") == {
            "node-1",
            "57fd23e06d0f2279e15fa41546948a5484b2665711aeb4c4f5e7fc00",
        }
