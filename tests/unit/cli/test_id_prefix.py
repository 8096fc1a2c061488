# SPDX-License-Identifier: Apache-2.0
"""Id prefixes select exactly one object, or are refused."""

import migrated
import pytest

from amphora_driver.cli import queries
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job, request
from amphora_driver.errors import UnknownObject

ONE, TWO = "52cf0000-0000-4000-8000-000000000001", "52cf1000-0000-4000-8000-000000000002"
POOL, GONE = "5aaa0000-0000-4000-8000-000000000003", "99990000-0000-4000-8000-000000000004"


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/db.sqlite"
    migrated.write(url)
    made = Database(url)

    def fill(connection):
        for one, op in ((ONE, "apply"), (TWO, "apply"), (POOL, "spares")):
            connection.execute(job.insert().values(load_balancer_id=one, op=op, generation=1))
        for number in range(12):
            row = {"id": f"ab{number:02}", "load_balancer_id": ONE, "role": "SINGLE", "state": "ready"}
            connection.execute(amphora.insert().values(**row, heartbeat_key=b"", created_at=0.0))
        row = {"load_balancer_id": GONE, "generation": 1, "action": "delete", "object_id": GONE, "accepted_at": 1.0}
        connection.execute(request.insert().values(**row))

    made.write(fill)
    yield made
    made.dispose()


@pytest.mark.parametrize(("text", "found"), [("52cf0", ONE), (ONE, ONE), ("52cf1", TWO)])
def test_a_prefix_selects_one_object(database, text, found):
    assert database.read(lambda c: queries.find_load_balancer_id(c, text)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("52cf", f"{ONE}, {TWO} have this prefix.*Give more"),
        ("7", "nothing is recorded"),
        ("", "nothing is recorded"),
        ("5%", "nothing is recorded"),
        ("5_cf0", "nothing is recorded"),
        ("5aaa", "nothing is recorded"),
        ("9999", "nothing is recorded"),
    ],
)
def test_a_prefix_of_none_or_several_objects_is_refused(database, text, words):
    with pytest.raises(UnknownObject, match=words):
        database.read(lambda c: queries.find_load_balancer_id(c, text))


def test_a_deleted_object_is_found_for_its_history(database):
    assert database.read(lambda c: queries.find_load_balancer_id(c, "9999", deleted=True)) == GONE
    with pytest.raises(UnknownObject, match=r"52cf0.*52cf1"):
        database.read(lambda c: queries.find_load_balancer_id(c, "5", deleted=True))


def test_a_long_list_of_matches_is_cut(database):
    assert database.read(lambda c: queries.find_amphora_id(c, "ab07")) == "ab07"
    with pytest.raises(UnknownObject, match=r"ab00, .*ab09 and others have this prefix"):
        database.read(lambda c: queries.find_amphora_id(c, "ab"))
