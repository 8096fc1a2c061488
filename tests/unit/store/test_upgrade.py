# SPDX-License-Identifier: Apache-2.0
"""Schema upgrades of a database with data: every database, a kill after each statement, and concurrent upgrades."""

import itertools
import os
import re
import shutil
import signal
import traceback
from contextlib import nullcontext

import galera
import msgspec
import pytest
import revision_0001 as old
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import job, request
from amphora_driver.database.tables_fleet import metadata, schema_minimum
from amphora_driver.database.vault import Vault
from amphora_driver.errors import SchemaMismatch, StoreError
from amphora_driver.model.enums import Kind
from amphora_driver.queue.jobs import Jobs
from amphora_driver.secret import Secret
from amphora_driver.store import (
    amphorae,
    desired_objects,
    listener_stats,
    sealed_secrets,
    status_outbox,
    vip_claims,
)
from amphora_driver.store.requests import RequestRecorder

DATABASES = ("sqlite", "mariadb", "postgresql")
# On a server, a kill after each statement takes minutes.
FILE_FIRST = ("sqlite", *(pytest.param(kind, marks=pytest.mark.extended) for kind in DATABASES[1:]))
_numbers = itertools.count()
VAULT = Vault([old.KEY])


LAST = schema_check.known_revisions()[-1]
NEXT = f"{int(LAST) + 1:04}"
# The values of generated columns.
GENERATED = {
    "unreported": lambda row: row["version"] > row["reported"],
    "exceptional": lambda row: row["committed"] < row["generation"] or row["read_back"] or row["op"] != "apply",
    "unready": lambda row: row["state"] != "ready",
}
ADDED = tuple(f"next_{number}" for number in range(8))
NEXT_REVISION = f"""import sqlalchemy as sa

from amphora_driver.database.migrations.repeatable import add_column, create_index, create_table

revision = "{NEXT}"
down_revision = "{LAST}"


def upgrade():
    for name in {ADDED}:
        add_column("job", sa.Column(name, sa.Integer(), nullable=True))
    create_table("next_table", sa.Column("id", sa.String(36), primary_key=True), sa.Column("name", sa.String(36)))
    create_index("ix_next_table_name", "next_table", ["name"])
"""


@pytest.fixture(autouse=True)
def next_revision(request, tmp_path_factory):
    """Add one more revision to the migrations, so that an upgrade with data is possible."""
    kind = request.node.callspec.params.get("kind") if hasattr(request.node, "callspec") else None
    if kind in ("mariadb", "postgresql"):
        request.getfixturevalue(f"{kind}_url")  # the database of the other tests has the real revisions
    folder = tmp_path_factory.mktemp("next") / "migrations"
    present = schema_check.DRIVER.migrations
    shutil.copytree(present, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / f"versions/{NEXT}_expand_next.py").write_text(NEXT_REVISION)
    msgspec.structs.force_setattr(schema_check.DRIVER, "migrations", folder)
    yield
    msgspec.structs.force_setattr(schema_check.DRIVER, "migrations", present)


@pytest.fixture
def filled(empty):
    """The URL of a filled database of revision 0001, and its rows."""
    return empty, fill(empty)


def fill(url):
    """Upgrade an empty database to revision 0001 and fill it; return the rows."""
    engine = migrate._upgrade_engine(url)
    with engine.connect() as connection:
        command.upgrade(migrate.alembic_config(connection), "0001")
        connection.commit()
        written = old.fill(connection, lambda content, location: VAULT.seal(Secret(content), location))
        connection.commit()
    engine.dispose()
    return written


def child(work):
    """Run the function in a separate process; return its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - a child must not continue as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def upgraded_until_killed(url, statements):
    """Upgrade in a process that is killed after the given number of schema statements."""

    def work():
        left = [statements]

        @sa.event.listens_for(sa.Engine, "after_cursor_execute")
        def _executed(_connection, _cursor, statement, *_others):
            if re.match(r"\s*(ALTER|CREATE)", statement):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        migrate.upgrade(url)

    return ended(child(work))


def check_schema(url):
    engine = migrate._upgrade_engine(url)
    with engine.connect() as connection:
        assert schema_check.read_state(connection).revisions == (NEXT,)
        found = sa.MetaData()
        found.reflect(connection)
    engine.dispose()
    assert set(found.tables) == {*metadata.tables, "alembic_version", "next_table"}
    for name, table in metadata.tables.items():
        added = set(ADDED) if name == "job" else set()
        assert {one.name for one in found.tables[name].columns} == {one.name for one in table.columns} | added, name
        assert {one.name for one in table.indexes} <= {one.name for one in found.tables[name].indexes}, name


def check_rows(url, written):
    """Check that all old values are unchanged, new columns are empty, and generated columns have their values."""
    engine = migrate._upgrade_engine(url)
    with engine.connect() as connection:
        for name, rows in written.items():
            table = metadata.tables[name]
            found = [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            assert len(found) == len(rows), name
            for row in rows:
                same = [one for one in found if all(one[column] == value for column, value in row.items())]
                assert len(same) == 1, (name, row, found)
                generated = {one.name for one in table.columns if one.computed is not None}
                assert all(same[0][one] == GENERATED[one](row) for one in generated), (name, row)
                new = set(same[0]) - set(row) - generated - {"id"}
                assert not any(same[0][column] for column in new), name
    engine.dispose()


@pytest.mark.parametrize("kind", DATABASES)
def test_an_upgrade_keeps_rows_and_jobs(filled):
    url, written = filled
    assert migrate.upgrade(url) == migrate.Upgrade(before="0001", after=NEXT)
    check_schema(url)
    check_rows(url, written)
    database = Database(url)
    try:
        read_by_todays_code(database)
        continued_by_a_controller(database)
    finally:
        database.dispose()


def read_by_todays_code(database):
    tree = database.read(lambda connection: desired_objects.load_tree(connection, old.LB))
    assert (tree.name, tree.vip.address) == ("web — ünïcode", "198.51.100.5")
    assert [one.id for one in tree.pools[0].members] == list(old.MEMBERS), "without the removed object"
    assert tree.listeners[0].l7policies[0].rules[0].value == "/private"
    (amphora,) = database.read(lambda connection: amphorae.load_amphorae(connection, old.LB))
    assert (amphora.id, amphora.confirmed, amphora.booted_at) == (old.AMPHORA, 3, None)
    assert amphora.plugged[0].port.addresses[0].address == "198.51.100.11"
    keys = database.read(lambda connection: amphorae.read_heartbeat_keys(connection, VAULT))
    assert keys == {old.AMPHORA: Secret(b"h" * 32)}
    kept = database.read(lambda connection: sealed_secrets.load_secrets(connection, old.LB))
    opened = {
        name.purpose.value: one.content and VAULT.open(one.content, sealed_secrets.secret_location(name)).reveal()
        for name, one in kept.items()
    }
    assert opened == {"certificate": b"certificate and key", "tickets": b"t" * 32, "ca": None}
    due = database.read(lambda connection: status_outbox.list_due_reports(connection, 100))
    assert [(one.object_id, one.operating.value) for one in due] == [(old.MEMBERS[0], "ERROR")]
    (total,) = database.read(lambda connection: listener_stats.list_due_totals(connection, 100))
    assert total.listener_id == old.LISTENER
    assert database.read(lambda connection: vip_claims.network_of_claim(connection, old.LATER)) == "local"


def continued_by_a_controller(database):
    """A controller claims the pending jobs, accepts a call, and confirms everything."""
    jobs = Jobs(database, "me", 60.0)
    lease = jobs.claim()
    assert (lease.load_balancer_id, lease.epoch) == (old.LB, 8)
    RequestRecorder(database, lambda node: None).update_object(Kind.MEMBER, old.MEMBERS[0], {"weight": 5})

    def confirm(connection):
        # The provider agent's and the controller's part after Octavia's commit and the amphora's confirmation.
        connection.execute(job.update().where(job.c.load_balancer_id == old.LB).values(committed=5))
        status_outbox.confirm_generation(connection, old.LB, 5, {})
        return connection.execute(sa.select(job.c.generation).where(job.c.load_balancer_id == old.LB)).scalar_one()

    assert database.write(confirm) == 5
    told = {
        one.object_id: one.provisioning
        for one in database.read(lambda connection: status_outbox.list_due_reports(connection, 100))
    }
    assert {old.LB, old.POOL, old.MEMBERS[0], old.GONE} <= set(told)
    history = database.read(
        lambda connection: connection.execute(
            sa.select(request.c.generation).where(request.c.load_balancer_id == old.LB).order_by(request.c.id)
        )
    )
    assert [row.generation for row in history] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", FILE_FIRST)
def test_an_upgrade_is_repeatable_after_a_kill_at_any_statement(kind, filled):
    """Databases with transactional schema changes roll back; MariaDB keeps each completed step."""
    url, written = filled
    steps = itertools.repeat(1, 120) if kind == "mariadb" else range(1, 60, 3)
    ends = []
    for statements in steps:
        ends.append(upgraded_until_killed(url, statements))
        check_rows_now(url, written)
        if ends[-1] == 0:
            break
    assert ends[-1] == 0
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert len(ends) > 2
    check_schema(url)
    check_rows(url, written)


def check_rows_now(url, written):
    """After an interrupted upgrade all old values are present."""
    engine = migrate._upgrade_engine(url)
    with engine.connect() as connection:
        for name, rows in written.items():
            assert connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar() == len(rows)
    engine.dispose()


@pytest.mark.parametrize("kind", ["mariadb"])
def test_an_installation_is_repeatable_after_a_kill_at_any_statement(empty):
    ends = [-signal.SIGKILL]
    while ends[-1] == -signal.SIGKILL and len(ends) < 30:
        ends.append(upgraded_until_killed(empty, 7))
    assert ends[1] == ends[2] == -signal.SIGKILL
    assert ends[-1] == 0
    check_schema(empty)


@pytest.mark.parametrize("kind", DATABASES)
def test_concurrent_upgrades(filled):
    url, written = filled
    pids = [child(lambda: migrate.upgrade(url)) for _ in range(3)]
    assert [ended(pid) for pid in pids] == [0, 0, 0]
    check_schema(url)
    check_rows(url, written)


@pytest.mark.parametrize("kind", ["mariadb"])
def test_concurrent_upgrades_without_a_common_lock(filled, monkeypatch):
    """Two nodes of a cluster: the later upgrade fails, checks again and finds the schema complete."""
    url, written = filled
    monkeypatch.setattr(migrate, "_upgrade_lock", lambda *_: nullcontext())
    pids = [child(lambda: migrate.upgrade(url)) for _ in range(2)]
    assert [ended(pid) for pid in pids] == [0, 0]
    check_rows(url, written)
    # The later upgrade may leave two revision marks; the next upgrade or start removes one.
    migrate.upgrade(url)
    check_schema(url)


@pytest.fixture(scope="module")
def cluster():
    """URLs of one database through each node of a cluster."""
    if os.geteuid() != 0 or galera.missing():
        pytest.skip(galera.missing() or "needs root")
    with galera.cluster("store") as urls:
        yield [sa.make_url(url) for url in urls]


@pytest.mark.extended
@pytest.mark.parametrize("first", [False, True], ids=["upgrade", "installation"])
def test_concurrent_upgrades_on_two_nodes_of_a_cluster(cluster, first):
    """Two hosts are upgraded at the same time, each with its own node."""
    for _ in range(3):
        name = f"upgrade{next(_numbers)}"
        engine = sa.create_engine(cluster[0], isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE DATABASE {name}")
        urls = [url.set(database=name).render_as_string(hide_password=False) for url in cluster]
        written = {} if first else fill(urls[0])
        pids = [child(lambda url=url: migrate.upgrade(url)) for url in urls for _ in range(2)]
        assert [ended(pid) for pid in pids] == [0, 0, 0, 0]
        for url in urls:
            check_schema(url)
            check_rows(url, written)
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name}")


@pytest.mark.parametrize("kind", ["sqlite"])
def test_two_revision_marks_are_merged(filled):
    url, _written = filled
    migrate.upgrade(url)
    engine = migrate._upgrade_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO alembic_version VALUES ('0001')")
    engine.dispose()
    database = Database(url)
    with pytest.raises(SchemaMismatch, match="between 0001 and"):
        database.read(lambda connection: None)
    migrate.upgrade(url)
    database.read(lambda connection: None)
    database.dispose()
    check_schema(url)


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize(
    ("revision", "words"),
    [
        ("0001", "the schema is 0001, this version requires .*amphoractl database upgrade"),
        ("9999", f"the contract migration 9999 has changed the schema 9999.*up to {NEXT}.*Install the version that"),
        (None, "the database has no schema.*amphoractl database upgrade"),
    ],
)
def test_no_service_works_with_another_schema(empty, revision, words):
    if revision:
        migrate.upgrade(empty)
    database = Database(empty)
    engine = migrate._upgrade_engine(empty)
    with engine.begin() as connection:
        if revision:
            connection.execute(sa.text("UPDATE alembic_version SET version_num = :to"), {"to": revision})
        if revision == "9999":
            connection.execute(schema_minimum.insert().values(revision="9999"))
    for attempt in (database.read, database.write):
        with pytest.raises(SchemaMismatch, match=words) as caught:
            attempt(lambda connection: pytest.fail("a statement of ours was let through"))
        assert isinstance(caught.value, StoreError), "callers that wait for the database handle this error"
    if revision == "9999":
        with pytest.raises(SchemaMismatch, match="the contract migration 9999"):
            migrate.upgrade(empty)
    else:
        migrate.upgrade(empty)
        assert database.read(lambda connection: "it goes on by itself")
    engine.dispose()
    database.dispose()


def test_revisions_are_named_by_their_files(tmp_path):
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        script = ScriptDirectory.from_config(migrate.alembic_config(connection))
    engine.dispose()
    line = [one.revision for one in script.walk_revisions()]
    assert tuple(reversed(line)) == schema_check.known_revisions()
    assert script.get_heads() == [schema_check.known_revisions()[-1]]
