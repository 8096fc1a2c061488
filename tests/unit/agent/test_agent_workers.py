# SPDX-License-Identifier: Apache-2.0
"""HAProxy's list of its processes, and the old workers that the agent ends."""

from __future__ import annotations

import pytest

from amphora_agent.haproxy.workers import MAX_OLD_WORKERS, Workers, excess_workers, parse

ANSWER = """#<PID>          <type>          <reloads>       <uptime>        <version>
10              master          4 [failed: 1]   0d00h00m09s     2.6.12-1+deb12u4
# workers
15              worker          0               0d00h00m01s     2.6.12-1+deb12u4
# old workers
13              worker          2               0d00h00m02s     2.6.12-1+deb12u4
14              worker          1               0d00h00m02s     2.6.12-1+deb12u4
11              worker          4               0d00h00m09s     2.6.12-1+deb12u4
# programs

"""


def test_a_process_list_is_parsed():
    assert parse(ANSWER) == Workers(4, 15, (11, 13, 14))
    assert parse(ANSWER.replace("15              worker", "# none         ")) == Workers(4, None, (11, 13, 14))
    assert parse("") is None
    assert parse("Unknown command\n") is None


@pytest.mark.parametrize(
    ("most", "ended"), [(1, (11, 13, 14)), (2, (11, 13)), (3, (11,)), (4, ()), (100, ()), (None, ())]
)
def test_the_oldest_workers_end_before_a_new_one(most, ended):
    assert excess_workers(parse(ANSWER), most) == ended


def test_the_default_limit_keeps_one_old_worker():
    many = Workers(20, 99, tuple(range(20)))
    assert len(many.replaced) - len(excess_workers(many, None)) == MAX_OLD_WORKERS - 1
