# SPDX-License-Identifier: Apache-2.0
"""Parameters of webhooks: body, query, other callers' bodies, idempotency keys."""

import json

import pytest

from amphora_cluster.api.parameters import MOST_SERVERS, Parameters, read_parameters
from amphora_cluster.model import Criterion, RequestKind
from amphora_driver.errors import RequestError

JOIN, LEAVE, SYNC = RequestKind.JOIN, RequestKind.LEAVE, RequestKind.SYNC
KEY = {"idempotency-key": "k1"}
ALARM = {
    "alarm_name": "cpu", "alarm_id": "1f", "severity": "low", "previous": "ok", "current": "alarm",
    "reason": "1 sample", "reason_data": {"count": 1, "type": "threshold"},
}  # fmt: skip


def read(kind, body=None, query=None, headers=None):
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_parameters(kind, query or {}, content, headers or {})


@pytest.mark.parametrize(
    ("kind", "body", "query", "headers", "found"),
    [
        (JOIN, {"server": "a"}, {}, {}, Parameters(servers=("a",))),
        (LEAVE, {"servers": ["a", "b", "a"]}, {}, {}, Parameters(servers=("a", "b"))),
        (LEAVE, {"servers": ["a"]}, {}, KEY, Parameters(servers=("a",), key="k1")),
        (LEAVE, {"count": 2}, {}, KEY, Parameters(count=2, key="k1")),
        (JOIN, {"count": "3"}, {}, KEY, Parameters(count=3, key="k1")),
        (
            LEAVE,
            {"count": 1, "criterion": "oldest"},
            {},
            KEY,
            Parameters(count=1, criterion=Criterion.OLDEST, key="k1"),
        ),
        (SYNC, None, {}, {}, Parameters()),
        (SYNC, {"servers": ["a"]}, {}, {}, Parameters(servers=("a",))),
        # Parameters in the query, beside the body of an alarm, a signal, or no JSON at all.
        (LEAVE, ALARM, {"count": ["1"]}, {"x-openstack-request-id": "req-1"}, Parameters(count=1, key="req-1")),
        (LEAVE, ALARM, {"count": ["1"]}, {"x-openstack-request-id": "r", **KEY}, Parameters(count=1, key="k1")),
        (LEAVE, None, {"count": ["1"], "idempotency_key": ["q"]}, {}, Parameters(count=1, key="q")),
        (JOIN, {"status": "SUCCESS", "id": "1", "data": "x"}, {"server": ["a"]}, {}, Parameters(servers=("a",))),
        (JOIN, b"status=SUCCESS", {"server": ["a,b", "c"]}, {}, Parameters(servers=("a", "b", "c"))),
        (SYNC, b"[1, 2]", {}, {}, Parameters()),
        # A request id of OpenStack may be that of a whole workflow, so it is no key if a repetition is harmless.
        (JOIN, {"server": "a"}, {}, {"x-openstack-request-id": "req-1"}, Parameters(servers=("a",))),
    ],
)
def test_valid(kind, body, query, headers, found):
    assert read(kind, body, query, headers) == found


@pytest.mark.parametrize(
    ("kind", "body", "query", "headers", "happened"),
    [
        (JOIN, None, {}, {}, "either servers or a count"),
        (LEAVE, None, {}, KEY, "either servers or a count"),
        (LEAVE, ALARM, {}, KEY, "either servers or a count"),
        (LEAVE, {"servers": ["a"], "count": 1}, {}, KEY, "either servers or a count"),
        (LEAVE, {"count": 1}, {}, {}, "needs an idempotency key"),
        (LEAVE, {"count": 1}, {}, {"idempotency-key": "a b"}, "key is not valid"),
        (LEAVE, {"count": 1}, {}, {"idempotency-key": "a" * 201}, "key is not valid"),
        (LEAVE, {"count": 0}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": -1}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": 1.5}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": True}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": "9" * 5000}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": "\u0663"}, {}, KEY, "count is not a number above 0"),
        (LEAVE, {"count": 1, "criterion": "best"}, {}, KEY, "criterion is not valid"),
        (LEAVE, {"count": 1, "criterion": ["oldest"]}, {}, KEY, "criterion is not valid"),
        (LEAVE, {"server": "a", "criterion": "oldest"}, {}, {}, "names servers"),
        (LEAVE, {"server": "a", "servers": ["b"]}, {}, {}, "server and servers"),
        (LEAVE, {"server": "a"}, {"server": ["b"]}, {}, "in the query and in the body"),
        (LEAVE, {"servers": []}, {}, {}, "the list of servers is empty"),
        (LEAVE, {"servers": "../etc"}, {}, {}, "not a list of server ids"),
        (LEAVE, {"servers": {"a": 1}}, {}, {}, "not a list of server ids"),
        (LEAVE, {"servers": [1]}, {}, {}, "not a list of server ids"),
        (LEAVE, {"servers": ["a\n"]}, {}, {}, "not a list of server ids"),
        (LEAVE, {"servers": ["a" * 65]}, {}, {}, "not a list of server ids"),
        (LEAVE, {"servers": [f"s{one}" for one in range(MOST_SERVERS + 1)]}, {}, {}, "more than 1000 servers"),
        (SYNC, {"count": 1}, {}, KEY, "a sync has no count"),
        (SYNC, None, {"criterion": ["oldest"]}, {}, "a sync has no count"),
    ],
)
def test_refused(kind, body, query, headers, happened):
    with pytest.raises(RequestError, match=happened) as caught:
        read(kind, body, query, headers)
    assert caught.value.remedy


def test_the_digest_tells_contents_apart():
    contents = [
        (LEAVE, Parameters(count=1)), (LEAVE, Parameters(count=2)), (JOIN, Parameters(count=1)),
        (LEAVE, Parameters(count=1, criterion=Criterion.OLDEST)), (LEAVE, Parameters(servers=("1", "2"))),
        (LEAVE, Parameters(servers=("12",))),
    ]  # fmt: skip
    digests = {one.digest(kind) for kind, one in contents}
    assert len(digests) == len(contents)
    assert Parameters(count=1, key="a").digest(LEAVE) == Parameters(count=1, key="b").digest(LEAVE)
