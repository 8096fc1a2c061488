# SPDX-License-Identifier: Apache-2.0
"""The rules for migrations of a rolling upgrade: run each migration on SQLite and compare the schema before and after.

Expand: a process of the previous version, which ignores the migration, can still write and read each row.
Contract: a process of this version, which does not wait for the migration, works before and after it.
"""

import re

import sqlalchemy as sa
from alembic import command

from amphora_driver.database import migrate, schema_check


def breaches(url, schema):
    """Apply the migrations one by one; return for each revision how it breaks the rules of its phase."""
    engine = migrate._upgrade_engine(url, schema)
    statements = []
    sa.event.listen(engine, "before_cursor_execute", lambda *event: statements.append(event[2]))
    contracts = schema_check.pending_contracts(schema_check.SchemaState(), schema)
    found = {}
    with engine.connect() as connection:
        before = {}
        for revision in schema_check.known_revisions(schema):
            statements.clear()
            command.upgrade(migrate.alembic_config(connection, schema), revision)
            connection.commit()
            after = _reflect(connection)
            rule = _contract_breaches if revision in contracts else _expand_breaches
            found[revision] = sorted(rule(before, after, [*statements]))
            before = after
    engine.dispose()
    return found


def _reflect(connection):
    tables = sa.MetaData()
    tables.reflect(connection)
    return tables.tables


def _expand_breaches(before, after, statements):
    for name, table in before.items():
        if name not in after:
            yield f"removes the table {name}"
            continue
        yield from _changed_columns(table, after[name])
        for rule in _rules(after[name]) - _rules(table):
            yield f"{name}: adds {rule}"
    for name in after.keys() - before.keys():
        for one in after[name].foreign_key_constraints:
            if one.referred_table.name in before:
                yield f"{name}: refers to {one.referred_table.name}, from which older processes delete rows"
    for statement in statements:
        changed = re.match(r"\s*(UPDATE|DELETE FROM)\s+\W?(\w+)", statement)
        if changed and changed[2] in before and not changed[2].endswith("_version"):
            yield f"{changed[2]}: changes rows, which older processes write again without this change"


def _changed_columns(old, new):
    for column in old.columns:
        name, now = f"{old.name}.{column.name}", new.columns.get(column.name)
        if now is None:
            yield f"removes the column {name}"
            continue
        if not _holds(now.type, column.type):
            yield f"{name}: {now.type} does not hold each {column.type}"
        if column.nullable and not now.nullable:
            yield f"{name}: is NOT NULL"
        if column.server_default is not None and now.server_default is None and not now.nullable:
            yield f"{name}: has no default any more"
    for column in new.columns:
        if column.name not in old.columns and not _may_be_omitted(column):
            yield f"adds {old.name}.{column.name} without a default"


def _contract_breaches(before, after, _statements):
    for name, table in after.items():
        if name not in before:
            yield f"adds the table {name}"
            continue
        yield from (
            f"adds the column {name}.{column.name}"
            for column in table.columns
            if column.name not in before[name].columns
        )
    for name, table in before.items():
        left = after[name].columns if name in after else table.columns
        for column in table.columns:
            if column.name not in left and not _may_be_omitted(column):
                yield f"removes {name}.{column.name}, which had no default before"


def _may_be_omitted(column):
    return column.nullable or column.server_default is not None


def _holds(new, old):
    """Return whether a column of the new type stores each value of the old one."""
    if str(new) == str(old):
        return True
    both_text = isinstance(new, sa.String) and isinstance(old, sa.String)
    return both_text and (new.length is None or (old.length is not None and new.length >= old.length))


def _rules(table):
    """Return the constraints of a table as texts."""
    found = {f"a unique index of {_names(one.columns)}" for one in table.indexes if one.unique}
    for one in table.constraints:
        if isinstance(one, sa.CheckConstraint):
            found.add(f"the check {one.sqltext}")
        elif isinstance(one, sa.ForeignKeyConstraint):
            found.add(f"the reference {_names(one.columns)} to {one.referred_table.name}")
        else:
            kind = "the primary key" if isinstance(one, sa.PrimaryKeyConstraint) else "the unique constraint"
            found.add(f"{kind} {_names(one.columns)}")
    return found


def _names(columns):
    return ", ".join(sorted(one.name for one in columns))
