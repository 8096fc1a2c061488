# SPDX-License-Identifier: Apache-2.0
"""The members of a plan as requests to Octavia: which ones are sent, and with which values."""

import msgspec
import pytest

from amphora_cluster.cloud.member_batch import MemberBatch, MemberRecord
from amphora_cluster.model import MemberChange, Step, StepKind

TAG, OTHER = "amphora-cluster:g1", "amphora-cluster:g2"
MINE = MemberRecord(id="m1", address="192.0.2.1", protocol_port=80, name="s1", tags=(TAG, "x"), monitor_port=8080)
FOREIGN = MemberRecord(id="m2", address="192.0.2.2", protocol_port=80, tags=(OTHER,))
SIX = MemberRecord(id="m3", address="2001:DB8:0::1", protocol_port=80, name="s3", tags=(TAG,))


def change(one, **more):
    values = {
        "member_id": one.id, "name": one.name, "address": one.address, "port": one.protocol_port, "weight": one.weight,
        "subnet_id": None, "monitor_port": one.monitor_port, "backup": one.backup,
    }  # fmt: skip
    return MemberChange(**{**values, **more})


def batch(*members):
    return MemberBatch({one.endpoint: one for one in members}, TAG)


def step(kind, *changes, server="s1"):
    return Step(kind=StepKind(kind), server_id=server, members=changes)


NEW = change(MINE, member_id=None, monitor_port=None)


@pytest.mark.parametrize(
    ("present", "one", "sent"),
    [
        ((), step("join", NEW), ["192.0.2.1"]),
        ((MINE,), step("join", change(MINE)), []),
        ((MINE,), step("repair", change(MINE)), []),
        ((MINE,), step("drain", change(MINE, weight=0)), ["192.0.2.1"]),
        ((MINE,), step("repair", change(MINE, name="x")), ["192.0.2.1"]),
        ((MINE,), step("repair", change(MINE, monitor_port=None)), ["192.0.2.1"]),
        ((MINE,), step("repair", change(MINE, backup=True)), ["192.0.2.1"]),
        # Octavia tells spellings of an address apart, so the batch has the spelling of the member.
        ((SIX,), step("drain", change(SIX, address="2001:db8::1", weight=0)), ["2001:DB8:0::1"]),
        # A drain creates no member, and a foreign member does not change.
        ((), step("drain", change(MINE, weight=0)), []),
        ((FOREIGN,), step("drain", change(FOREIGN, weight=0)), []),
        ((FOREIGN,), step("repair", change(FOREIGN, weight=5)), []),
        # A member that is being deleted cannot change, and one in ERROR is sent again.
        (
            (msgspec.structs.replace(MINE, provisioning_status="PENDING_DELETE"),),
            step("drain", change(MINE, weight=0)),
            [],
        ),
        ((msgspec.structs.replace(MINE, provisioning_status="ERROR"),), step("repair", change(MINE)), ["192.0.2.1"]),
    ],
)
def test_the_batch(present, one, sent):
    work = batch(*present)
    assert [member["address"] for member in work.batch_of(one)] == sent
    assert (work.refused, work.deleted_of(one)) == ({}, [])


def test_a_join_on_the_address_of_another_member_is_refused():
    work = batch(FOREIGN)
    second = msgspec.structs.replace(NEW, address="192.0.2.3")
    assert work.batch_of(step("join", change(FOREIGN, member_id=None), second)) == []
    assert work.refused == {"s1": "Member m2 has address 192.0.2.2 and port 80, but not the tag of this group."}


def test_the_values_of_a_new_member():
    [sent] = batch().batch_of(step("join", msgspec.structs.replace(NEW, subnet_id="net", monitor_port=81, weight=0)))
    assert sent == {
        "name": "s1", "address": "192.0.2.1", "protocol_port": 80, "weight": 0, "backup": False, "tags": [TAG],
        "subnet_id": "net", "monitor_port": 81,
    }  # fmt: skip


def test_a_changed_member_keeps_what_the_group_does_not_set():
    present = msgspec.structs.replace(MINE, admin_state_up=False, monitor_address="192.0.2.9", subnet_id="net")
    [sent] = batch(present).batch_of(step("drain", change(present, weight=0, subnet_id="other")))
    assert sent == {
        "name": "s1", "address": "192.0.2.1", "protocol_port": 80, "weight": 0, "backup": False, "tags": [TAG, "x"],
        "subnet_id": "net", "monitor_port": 8080, "monitor_address": "192.0.2.9", "admin_state_up": False,
    }  # fmt: skip


def test_only_own_members_are_deleted():
    pending = msgspec.structs.replace(SIX, provisioning_status="PENDING_DELETE")
    work = batch(MINE, FOREIGN, pending)
    leave = step("leave", change(MINE), change(FOREIGN), change(pending), change(MINE, member_id="gone"))
    assert (work.deleted_of(leave), work.batch_of(leave)) == (["m1"], [])
