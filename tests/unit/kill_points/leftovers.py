# SPDX-License-Identifier: Apache-2.0
"""Lists of unsettled work, orphans and drift. A run ends when all lists are empty."""

import sqlalchemy as sa

from amphora_driver.database import tables
from amphora_driver.database.tables import job
from amphora_driver.model import from_octavia
from amphora_driver.model.amphora import AmphoraState
from amphora_driver.provider_agent.octavia_audit import describe_differences
from amphora_driver.store import amphorae, desired_objects, failovers, rotations, spare_pools, status_outbox

# A run calls this in every round, and SQLAlchemy needs longer to build a statement than to run it.
_BUSY = sa.select(job.c.load_balancer_id, job.c.op, job.c.generation, job.c.applied, job.c.committed).where(
    sa.or_(
        job.c.owner.is_not(None),
        sa.and_(
            # The row of a pool stays due as long as the pool exists.
            job.c.op != spare_pools.OP,
            sa.or_(
                job.c.dirty,
                job.c.applied < job.c.generation,
                job.c.committed < job.c.generation,
                job.c.read_back,
            ),
        ),
    )
)
_UNSETTLED = sa.select(tables.amphora.c.id).where(tables.amphora.c.state != AmphoraState.READY.value)


def undone(deployment):
    """The first kind of accepted work that is not settled."""

    def read(connection):
        found = [tuple(row) for row in connection.execute(_BUSY)]
        found = found or [("goes or boots", one) for one in connection.execute(_UNSETTLED).scalars()]
        found = found or [
            ("to be reported", one.object_id, one.provisioning)
            for one in status_outbox.list_due_reports(connection, 100)
        ]
        found = found or [("is being replaced", one.amphora_id) for one in failovers.list_open_failovers(connection)]
        rotation = None if found else rotations.get_active_rotation(connection)
        return found if rotation is None else [("rotation", rotation.id, rotation.state, rotation.reason)]

    return deployment.database.read(read)


def waited_for(deployment):
    """As `unsettled`, with Octavia's open transactions, which only the test's own process sees."""
    return list(deployment.octavia.pending().items()) or undone(deployment)


def _unsettled(connection):
    of = tables.amphora
    return connection.execute(sa.select(of.c.id).where(of.c.state != AmphoraState.READY.value)).scalars()


def unowned(deployment):
    """Rows, machines and ports without a load balancer, and rows without their machine or port."""

    def read(connection):
        def values(column):
            return set(connection.execute(sa.select(column).distinct()).scalars())

        return (
            {row.load_balancer_id: row for row in connection.execute(sa.select(job))},
            {row.id: row for row in connection.execute(sa.select(tables.amphora))},
            {row.id: row for row in connection.execute(sa.select(tables.local_port))},
            {
                table.name: values(table.c.load_balancer_id)
                for table in (tables.desired_object, tables.object_status, tables.secret, tables.request)
            },
            values(tables.vip_claim.c.load_balancer_id),
            values(tables.amphora_heartbeat.c.amphora_id),
            values(tables.orphan.c.id),
        )

    rows, machines, ports, owned, claims, seen, noted = deployment.database.read(read)
    known, pools = set(deployment.octavia.trees), {one for one, row in rows.items() if row.op == spare_pools.OP}
    state = deployment.cloud.kept.read()
    found = [f"work without a load balancer: {one}" for one in rows.keys() - known - pools]
    found += [f"unknown to the provider: {one}" for one in known - rows.keys()]
    for name, owners in owned.items():
        found += [f"{name} of {one}" for one in owners - rows.keys()]
    found += [f"claim of {one}" for one in claims - rows.keys()]
    found += [f"amphora {one}" for one, row in machines.items() if row.load_balancer_id not in rows]
    found += [f"seen: {one}" for one in seen - machines.keys()]
    found += [f"noted as an orphan: {one}" for one in noted]
    found += [f"machine {one}" for one in state["machines"].keys() - machines.keys()]
    found += [f"no machine of {one}" for one in machines.keys() - state["machines"].keys()]
    owners = {*machines, *(f"lb-{one}" for one in rows.keys() - pools)}
    found += [f"port {one} of {row.owner}" for one, row in ports.items() if row.owner not in owners]
    joined = {port for machine in state["machines"].values() for port in machine["ports"].values()}
    mine = {one for one, row in ports.items() if row.owner in machines}
    found += [f"port {one} is joined to no machine" for one in mine - joined]
    found += [f"port {one} is joined and not there" for one in joined - mine]
    found += [f"VIP options of {one}" for one in state["options"].keys() - known]
    return found


def unlike(deployment):
    """Differences between rows, Octavia and amphorae of one load balancer."""

    def read(connection):
        found = []
        for of, tree in deployment.octavia.trees.items():
            row = connection.execute(sa.select(job).where(job.c.load_balancer_id == of)).first()
            if row is None:
                continue
            found += describe_differences(desired_objects.load_tree(connection, of), from_octavia.load_balancer(tree))
            for one in amphorae.load_amphorae(connection, of):
                served = (state["machines"].get(one.id, {}).get("bundle") or {}).get("generation")
                if not served == one.confirmed == row.generation:
                    found.append(f"{one.id} serves {served}, has confirmed {one.confirmed}, wanted is {row.generation}")
                if one.management_address is None or not one.plugged:
                    found.append(f"{one.id} has no address or no port")
        unanswered = sa.select(tables.request.c.action).where(tables.request.c.applied_at.is_(None))
        return found + [f"unanswered: {one}" for one in connection.execute(unanswered).scalars()]

    state = deployment.cloud.kept.read()
    found = deployment.database.read(read)
    found += [f"said too early: {one}" for one in deployment.octavia.early]
    return found + [f"{one} is {said}" for one, said in deployment.octavia.provisioning.items() if said != "ACTIVE"]


def everything(deployment):
    return [*waited_for(deployment), *unowned(deployment), *unlike(deployment)]
