# SPDX-License-Identifier: Apache-2.0
"""Requests, idempotency keys, tokens and nonces in real databases."""

import threading

import msgspec
import pytest
import sqlalchemy as sa

from amphora_cluster.database.claims import Claims, PassEnd
from amphora_cluster.database.requests import StoredRequest, TooManyOpen
from amphora_cluster.database.tables import nonce_row, request_row, token_row
from amphora_cluster.database.tokens import token_digest, token_id
from amphora_cluster.model import Request, RequestKind
from amphora_driver.errors import Conflict, UnknownObject
from amphora_driver.secret import Secret

LEAVE = Request(id="", group_id="g1", kind=RequestKind.LEAVE, count=2)


@pytest.fixture
def stores(any_cluster, make_stores):
    made = make_stores(any_cluster)
    made.add()
    return made


def finished(stores, request, at=None):
    """Record the outcome of a request in a pass."""
    (claim,) = Claims(stores.database, "one", 30).claim()
    (loaded,) = stores.passes.load([claim])
    (found,) = [one for one in loaded.requests if one.request.id == request.id]
    ended = msgspec.structs.replace(
        found.request, servers=("s1", "s2"), outcome={"s1": "", "s2": "stuck"}, ended_at=at or stores.database.now()
    )
    # The estimate of the database's clock may be some milliseconds ahead of this clock.
    end = PassEnd(claim=claim, due_at=stores.database.now() - 1)
    stores.passes.finish(end, (), (), [StoredRequest(request=ended, applied=True)])
    return ended


def test_a_request_is_open_until_a_pass_ends_it(stores):
    made = stores.requests.add(LEAVE)
    assert made.created_at == pytest.approx(stores.database.now(), abs=30)
    assert stores.requests.get("g1", made.id) == made
    (claim,) = Claims(stores.database, "one", 30).claim()
    (loaded,) = stores.passes.load([claim])
    assert loaded.requests == (StoredRequest(request=made),)
    applied = StoredRequest(request=msgspec.structs.replace(made, servers=("s1", "s2")), applied=True)
    stores.passes.record(claim, (), (), [applied])
    (loaded,) = stores.passes.load([claim])
    assert loaded.requests == (applied,)
    stores.database.write(lambda c: c.execute(sa.text("UPDATE cluster_group SET owner = NULL")))
    ended = finished(stores, made)
    assert stores.requests.get("g1", made.id) == ended
    (claim,) = Claims(stores.database, "one", 30).claim()
    (loaded,) = stores.passes.load([claim])
    assert loaded.requests == ()


def test_open_requests_are_in_the_order_of_their_arrival(stores):
    made = [stores.requests.add(msgspec.structs.replace(LEAVE, count=number)) for number in range(1, 6)]
    for number, one in enumerate(made):
        stores.database.write(lambda c, n=number, i=one.id: c.execute(
            request_row.update().where(request_row.c.id == i).values(created_at=100.0 - n)
        ))  # fmt: skip
    (claim,) = Claims(stores.database, "one", 30).claim()
    (loaded,) = stores.passes.load([claim])
    assert [one.request.count for one in loaded.requests] == [5, 4, 3, 2, 1]
    assert [one.count for one in stores.requests.list_requests("g1", 3)] == [1, 2, 3], "newest first"


def test_a_repeated_request_returns_the_first_one(stores):
    made = stores.requests.add(LEAVE, key="k1", digest="d")
    assert stores.requests.add(LEAVE, key="k1", digest="d") == made
    ended = finished(stores, made)
    assert stores.requests.add(LEAVE, key="k1", digest="d") == ended, "also its outcome"
    with pytest.raises(Conflict, match="the same idempotency key"):
        stores.requests.add(LEAVE, key="k1", digest="e")
    stores.add("g2")
    other = stores.requests.add(msgspec.structs.replace(LEAVE, group_id="g2"), key="k1", digest="d")
    assert other.id != made.id, "another group"
    assert stores.requests.add(LEAVE).id != stores.requests.add(LEAVE).id, "no key"
    assert len(stores.requests.list_requests("g1", 9)) == 3


def test_keys_with_other_letters_are_other_keys(stores):
    made = {stores.requests.add(LEAVE, key=key, digest="d").id for key in ("k", "K", "\u00e9", "e")}
    assert len(made) == 4


def test_the_number_of_open_requests_is_limited(stores, monkeypatch):
    monkeypatch.setattr("amphora_cluster.database.requests.MOST_OPEN", 2)
    first = stores.requests.add(LEAVE, key="k", digest="d")
    stores.requests.add(LEAVE)
    with pytest.raises(TooManyOpen, match="it has 2 open requests"):
        stores.requests.add(LEAVE)
    assert stores.requests.add(LEAVE, key="k", digest="d") == first, "a repetition needs no room"
    stores.add("g2")
    stores.requests.add(msgspec.structs.replace(LEAVE, group_id="g2"))
    finished(stores, first)
    stores.requests.add(LEAVE)


def test_concurrent_repetitions_record_one_request(stores):
    made = []
    barrier = threading.Barrier(6)

    def call():
        barrier.wait(20)
        made.append(stores.requests.add(LEAVE, key="k", digest="d").id)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(made) == 6
    assert len(set(made)) == 1
    assert len(stores.requests.list_requests("g1", 9)) == 1


def test_requests_of_unknown_groups_are_refused(stores):
    with pytest.raises(UnknownObject):
        stores.requests.add(msgspec.structs.replace(LEAVE, group_id="g9"))
    made = stores.requests.add(LEAVE)
    for group, request in (("g2", made.id), ("g1", "unknown")):
        with pytest.raises(UnknownObject):
            stores.requests.get(group, request)
    stores.groups.delete("g1")
    with pytest.raises(UnknownObject, match="is being deleted"):
        stores.requests.add(LEAVE)


def test_ended_requests_are_kept_for_the_retention_time(stores):
    old = stores.requests.add(LEAVE, key="old", digest="d")
    finished(stores, old, stores.database.now() - 100.0)
    new = stores.requests.add(LEAVE)
    finished(stores, new, stores.database.now() - 10.0)
    waiting = stores.requests.add(LEAVE)
    assert stores.requests.purge(200.0, stores.database.now()) == 0
    assert stores.requests.purge(50.0, stores.database.now()) == 1
    assert {one.id for one in stores.requests.list_requests("g1", 9)} == {new.id, waiting.id}
    assert stores.requests.add(LEAVE, key="old", digest="other").id != old.id, "the key has ended too"
    assert stores.requests.purge(0.0, stores.database.now()) == 1, "an open request is never deleted"


def test_only_the_digest_of_a_token_is_stored(stores):
    record, token = stores.tokens.create("g1", "Aodh", "operator", 60.0)
    text = token.reveal().decode()
    assert token_id(text) == record.id
    row = stores.database.read(lambda c: c.execute(sa.select(token_row)).one())
    assert text.partition(".")[2].encode() not in row.digest
    found, digest = stores.tokens.find(record.id)
    assert found == record
    assert digest == token_digest(Secret(text.encode()))
    assert digest != token_digest(Secret(text[:-1].encode()))
    assert digest.reveal() not in row.digest, "the digest is the key of signatures"
    assert stores.tokens.list_tokens("g1") == (record,)


def test_invalid_tokens_are_not_found(stores):
    record, _ = stores.tokens.create("g1", "a", "operator", -1.0)
    assert stores.tokens.find(record.id) is None, "expired"
    record, _ = stores.tokens.create("g1", "b", "operator")
    assert stores.tokens.find(record.id)[0].expires_at is None
    stores.add("g2")
    with pytest.raises(UnknownObject):
        stores.tokens.delete("g2", record.id)
    stores.groups.delete("g1")
    assert stores.tokens.find(record.id) is None, "the group is being deleted"
    stores.tokens.delete("g1", record.id)
    with pytest.raises(UnknownObject):
        stores.tokens.delete("g1", record.id)
    assert stores.tokens.find(record.id) is None
    assert [token_id(one) for one in ("", "abc", ".x", "a.b.c")] == ["", "", "", "a"]


def test_a_nonce_is_accepted_once(stores):
    assert stores.tokens.use_nonce("t1", "n", 60.0)
    assert not stores.tokens.use_nonce("t1", "n", 60.0)
    assert stores.tokens.use_nonce("t2", "n", -1.0), "another token"
    stores.requests.purge(3600.0, stores.database.now())
    assert stores.database.read(lambda c: c.execute(sa.select(nonce_row.c.token_id)).scalars().all()) == ["t1"]
    assert not stores.tokens.use_nonce("t1", "n", 60.0)


def test_concurrent_uses_of_a_nonce_have_one_winner(stores):
    results = []
    barrier = threading.Barrier(6)

    def call():
        barrier.wait(20)
        results.append(stores.tokens.use_nonce("t", "n", 60.0))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert sorted(results) == [False] * 5 + [True]
