# SPDX-License-Identifier: Apache-2.0
"""How much a database reads for a poll, independent of its load."""

import json

import sqlalchemy as sa


def effort(database, work, tables, *columns):
    """Return how much the database reads for `work`.

    The result is the number of rows (MariaDB), of rows of `tables` that statements with one of `columns` read
    (PostgreSQL), or of instructions of the virtual machine (SQLite).
    """

    def scanned_rows(connection, work):
        return _scanned_rows(connection, work, {one.name for one in tables}, columns)

    measure = {"sqlite": _instructions, "mysql": _handler_reads, "postgresql": scanned_rows}
    work_done = database.read(lambda c: measure[c.dialect.name](c, work))
    assert work_done > 0
    return work_done


def _instructions(connection, work):
    counted = []
    driver = connection.connection.driver_connection
    driver.set_progress_handler(lambda: counted.append(1), 10)
    work(connection)
    driver.set_progress_handler(None, 0)
    return 10 * len(counted)


def _handler_reads(connection, work):
    def read():
        counters = connection.exec_driver_sql("SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_%%'").all()
        # A pushed index condition (ICP) reads an index entry that no other counter has.
        return sum(int(value) for name, value in counters if name.startswith(("Handler_read_", "Handler_icp_attempts")))

    before = read()
    work(connection)
    return read() - before


def _scanned_rows(connection, work, tables, columns):
    executed = []

    def record(_connection, _cursor, statement, parameters, *_others):
        # PostgreSQL may read a small table completely to find rows by their ids.
        if any(one in statement for one in columns):
            executed.append((statement, parameters))

    sa.event.listen(connection, "before_cursor_execute", record)
    work(connection)
    sa.event.remove(connection, "before_cursor_execute", record)
    plans = [
        connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
        for statement, parameters in executed
    ]
    decoded = (json.loads(one) if isinstance(one, str) else one for one in plans)
    return sum(_scanned(one[0]["Plan"], tables) for one in decoded)


def _scanned(plan, tables):
    found = sum(_scanned(one, tables) for one in plan.get("Plans", ()))
    if plan.get("Relation Name") in tables:
        read = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        found += sum(plan.get(one, 0) for one in read) * plan["Actual Loops"]
    return found
