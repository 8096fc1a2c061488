# SPDX-License-Identifier: Apache-2.0
"""Status and upgrade of a schema for the commands of operators, with the fields of their output."""

from __future__ import annotations

from typing import Any

from amphora_driver.database import migrate, schema_check
from amphora_driver.database.schema_check import DRIVER, Schema, SchemaState
from amphora_driver.errors import StoreError


def schema_values(state: SchemaState, schema: Schema = DRIVER) -> dict[str, Any]:
    """Return the output of `database status`."""
    wrong = schema_check.describe_mismatch(state, schema)
    happened, remedy = wrong or ("", "")
    return {
        "Schema": " ".join(state.revisions),
        "Wanted": schema_check.required_revision(schema),
        "Fits": wrong is None,
        "Contract migrations": " ".join(schema_check.pending_contracts(state, schema)) if state.revisions else "",
        "Reason": happened,
        "What to do": remedy,
    }


def upgrade_values(url: str, schema: Schema = DRIVER, *, contract: bool, force: bool) -> dict[str, Any]:
    """Upgrade a database, unless it would stop a process; return the output of `database upgrade`."""
    if not force and (names := migrate.blocking_processes(url, schema, contract=contract)):
        raise StoreError(
            "upgrade the database",
            f"these processes use it and do not work with the new schema: {', '.join(names)}",
            "Upgrade or stop them on every host. A crashed process is listed for a minute; if none of these runs, use "
            "--force.",
        )
    done = migrate.upgrade(url, schema, contract=contract)
    return {"Before": done.before, "After": done.after, "Contract migrations": " ".join(done.pending)}
