# SPDX-License-Identifier: Apache-2.0
"""Each migration follows the rules of its phase, and the rules find each kind of breach."""

import shutil

import msgspec
import pytest
from migration_rules import breaches

from amphora_cluster.database.tables import SCHEMA as CLUSTER
from amphora_driver.database import schema_check
from amphora_driver.database.schema_check import DRIVER, Phase, SchemaState

NEXT = f"{int(schema_check.known_revisions()[-1]) + 1:04}"


def with_migration(folder, phase, *lines, schema=DRIVER):
    """Return the schema with one more migration, whose statements are these lines."""
    migrations = folder / "migrations"
    shutil.copytree(schema.migrations, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    imports = "import sqlalchemy as sa\nfrom alembic import op\n"
    head = f'{imports}\nrevision = "{NEXT}"\ndown_revision = "{int(NEXT) - 1:04}"\n\n\ndef upgrade():\n'
    (migrations / f"versions/{NEXT}_{phase}_next.py").write_text(head + "".join(f"    {one}\n" for one in lines))
    return msgspec.structs.replace(schema, migrations=migrations)


def breaches_of(folder, phase, *lines):
    found = breaches(f"sqlite:///{folder}/rules.sqlite", with_migration(folder, phase, *lines))
    assert not any(words for revision, words in found.items() if revision != NEXT)
    return found[NEXT]


@pytest.mark.parametrize("schema", [DRIVER, CLUSTER], ids=["driver", "cluster"])
def test_each_migration_follows_the_rules(tmp_path, schema):
    found = breaches(f"sqlite:///{tmp_path}/rules.sqlite", schema)
    assert list(found) == list(schema_check.known_revisions(schema))
    assert {revision: words for revision, words in found.items() if words} == {}


BATCH = 'with op.batch_alter_table("process") as table: '
# On SQLite, Alembic cannot copy a table with a generated column.
WITHOUT_GENERATED = 'op.drop_index("ix_job_exceptional"); op.drop_column("job", "exceptional")\n    '


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ('op.drop_table("orphan")', "removes the table orphan"),
        ('op.rename_table("orphan", "lost")', "removes the table orphan"),
        ('op.drop_column("process", "jobs")', "removes the column process.jobs"),
        (BATCH + 'table.alter_column("jobs", new_column_name="works")', "removes the column process.jobs"),
        (BATCH + 'table.alter_column("version", nullable=False)', "process.version: is NOT NULL"),
        (BATCH + 'table.alter_column("host", type_=sa.String(9))', "process.host: VARCHAR(9) does not hold each"),
        (BATCH + 'table.alter_column("beat", type_=sa.Text())', "process.beat: TEXT does not hold each BIGINT"),
        (
            BATCH + 'table.add_column(sa.Column("new", sa.Integer, nullable=False))',
            "adds process.new without a default",
        ),
        ('op.execute("ALTER TABLE orphan ADD COLUMN new INTEGER NOT NULL DEFAULT 1; ")', None),
        ('op.create_index("once", "process", ["host"], unique=True)', "process: adds a unique index of host"),
        (BATCH + 'table.create_unique_constraint("once", ["host"])', "process: adds the unique constraint host"),
        (BATCH + 'table.create_check_constraint("few", "jobs < 9")', "process: adds the check jobs < 9"),
        (
            WITHOUT_GENERATED
            + 'with op.batch_alter_table("job") as table: table.alter_column("writes", server_default=None)',
            "job.writes: has no default any more",
        ),
        ('op.execute("UPDATE process SET jobs = 0")', "process: changes rows"),
        ('op.execute("DELETE FROM process")', "process: changes rows"),
        (
            'op.create_table("new", sa.Column("lb", sa.Text, sa.ForeignKey("job.load_balancer_id")))',
            "new: refers to job, from which older processes delete rows",
        ),
        ('op.create_index("quick", "process", ["host"])', None),
        ('op.create_table("new", sa.Column("id", sa.Integer, primary_key=True))', None),
        ('op.add_column("process", sa.Column("new", sa.Integer, nullable=True))', None),
        (BATCH + 'table.alter_column("host", type_=sa.Text())', None),
        (BATCH + 'table.alter_column("host", nullable=True)', None),
    ],
)
def test_an_expand_migration_changes_nothing_that_older_processes_use(tmp_path, statement, words):
    found = breaches_of(tmp_path, "expand", statement)
    assert found == [] if words is None else any(one.startswith(words) for one in found), found


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ('op.create_table("new", sa.Column("id", sa.Integer, primary_key=True))', "adds the table new"),
        ('op.add_column("process", sa.Column("new", sa.Integer))', "adds the column process.new"),
        ('op.drop_column("process", "jobs")', "removes process.jobs, which had no default before"),
        ('op.drop_column("process", "version")', None),
        ('op.drop_table("orphan")', None),
        (BATCH + 'table.alter_column("version", nullable=False)', None),
    ],
)
def test_a_contract_migration_changes_nothing_that_this_version_uses(tmp_path, statement, words):
    found = breaches_of(tmp_path, "contract", statement)
    assert found == [] if words is None else any(one.startswith(words) for one in found), found


def test_a_migration_without_a_phase_is_refused(tmp_path):
    schema = with_migration(tmp_path, "soon", "pass")
    with pytest.raises(ValueError, match="'soon' is not a valid Phase"):
        schema_check.known_revisions(schema)


def test_the_phase_is_part_of_the_file_name(tmp_path):
    schema = with_migration(tmp_path, Phase.CONTRACT.value, "pass")
    assert schema_check.known_revisions(schema)[-1] == NEXT
    assert schema_check.required_revision(schema) == f"{int(NEXT) - 1:04}"
    assert schema_check.pending_contracts(SchemaState(revisions=(NEXT,), minimum=NEXT), schema) == ()
