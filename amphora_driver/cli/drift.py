# SPDX-License-Identifier: Apache-2.0
"""What amphorae have, beside what is wanted of them; and having it put right.

Invariant: `diff` and `diagnose` ask agents with the configured certificate and change nothing; what an agent does not
answer is said, and costs the others nothing. `repair` writes rows only, and works while every process is down. No
secret is ever shown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from cliff.command import Command

from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.cli import config_diff, id_prefix
from amphora_driver.cli.terminal_escape import plain
from amphora_driver.database.tables import amphora, amphora_seen, work
from amphora_driver.database.vault import Vault
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentError, AgentRefused, Conflict
from amphora_driver.maintenance.drift_audit import load_record
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket
from amphora_driver.reconcile.desired_bundle import bodies
from amphora_driver.store import config_drift
from amphora_driver.store.requests import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

# Seconds an agent may take to answer.
_COMPARING, _DIAGNOSING = 20.0, 60.0
_NOT_FOUND = 404
DIFFERENT, SILENT = 1, 2


class DiffLoadBalancer(Command):
    """Compare what is wanted of a load balancer with what each of its amphorae runs.

    A unified diff of HAProxy's configuration and of everything else that an amphora is given. The exit status is 0
    where nothing differs, 1 where something does, 2 where an amphora did not answer, whatever the others have said.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer, or its beginning.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Ask every amphora, and print what differs."""
        catalogue, vault = Catalogue(self.app.conf, self.app.database), _vault(self.app)
        chosen = self.app.read(lambda connection: id_prefix.load_balancer(connection, parsed_args.load_balancer))
        recorded = self.app.read(lambda connection: load_record(connection, chosen, catalogue))
        if recorded is None:
            raise Conflict(f"compare load balancer {chosen}", "it is being made, or removed", "Wait for that.")
        wanted = {one: json.loads(body) for one, body in bodies(recorded, self.app.conf, vault).items()}
        agents = _agents(self.app, vault)
        status = 0
        try:
            for one in recorded.amphorae:
                try:
                    said = _said(agents, one.id, one.management_address)
                except AgentError as error:
                    self.app.stderr.write(f"{plain(str(error))}\n")
                    status = max(status, SILENT)
                    continue
                lines = config_diff.differences(one.id, wanted[one.id], said)
                self.app.stdout.writelines(f"{line}\n" for line in lines)
                status = max(status, DIFFERENT if lines else 0)
        finally:
            agents.close()
        return status


class RepairLoadBalancer(Command):
    """Have every amphora of a load balancer given its configuration again."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("load_balancer", metavar="ID", help="Id of the load balancer, or its beginning.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        """Write it down, and say what happens next."""

        def write(connection: sa.Connection) -> tuple[str, list[str]]:
            chosen = id_prefix.load_balancer(connection, parsed_args.load_balancer)
            op = connection.execute(sa.select(work.c.op).where(work.c.load_balancer_id == chosen)).scalar_one()
            if op != Op.APPLY:
                raise Conflict(f"repair load balancer {chosen}", "it is being removed", "Wait for that.")
            return chosen, config_drift.revoke_all_confirmations(
                connection, chosen, "operator: its configuration is given again"
            )

        chosen, amphorae = self.app.database.write(write)
        local_socket.wake_role(self.app.conf.queue.doorbell_dir, local_socket.CONTROLLER)
        what = ", ".join(amphorae) or "none has confirmed anything yet; what is missing is made"
        self.app.stdout.write(
            f"Load balancer {chosen} is due. Its amphorae are given their configuration again, and look at everything: "
            f"{what}.\nClients are served meanwhile. What differs then is shown by: amphoractl loadbalancer diff "
            f"{chosen}\n"
        )


class DiagnoseAmphora(Command):
    """Fetch everything an amphora can tell about itself, as one JSON document; it holds no secret."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("amphora", metavar="ID", help="Id of the amphora, or its beginning.")
        parser.add_argument("--output", metavar="FILE", type=Path, help="Where to; default: standard output.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Fetch; 2 if the amphora does not answer, with what is recorded of it in its place."""
        chosen, row = self.app.read(lambda connection: _row(connection, parsed_args.amphora))
        agents = _agents(self.app, _vault(self.app))
        try:
            if row["management_address"] is None:
                self.app.stderr.write(f"amphora {chosen} has no address: its machine is not there (yet)\n")
                found: dict[str, Any] | None = None
            else:
                deadline = Deadline(_DIAGNOSING, f"diagnose amphora {chosen}")
                found = agents.diagnostics(chosen, row["management_address"], deadline=deadline)
        except AgentError as error:
            found = None
            self.app.stderr.write(f"{plain(str(error))}\n")
        finally:
            agents.close()
        if found is None:
            self.app.stderr.write("It cannot tell anything; what is recorded of it follows.\n")
        text = json.dumps({"recorded": row, **({} if found is None else {"agent": found})}, indent=1, default=str)
        if parsed_args.output is None:
            self.app.stdout.write(f"{text}\n")
        else:
            parsed_args.output.write_text(f"{text}\n", encoding="utf-8")
            self.app.stdout.write(f"{parsed_args.output}\n")
        return 0 if found is not None else SILENT


def _row(connection: sa.Connection, text: str) -> tuple[str, Mapping[str, Any]]:
    chosen = id_prefix.amphora_id(connection, text)
    ours = [column for column in amphora.c if column.name != "heartbeat_key"]
    heard = [amphora_seen.c.seen_at, amphora_seen.c.generation.label("heard_generation"), amphora_seen.c.holds_vip]
    together = amphora.outerjoin(amphora_seen, amphora_seen.c.amphora_id == amphora.c.id)
    query = sa.select(*ours, *heard).select_from(together).where(amphora.c.id == chosen)
    return chosen, dict(connection.execute(query).mappings().one())


def _vault(app: Any) -> Vault:
    return Vault.load(app.conf.store.encryption_key_file)


def _agents(app: Any, vault: Vault) -> AgentClient:
    return AgentClient(app.conf, TrustStore(app.conf, app.database, vault))


def _said(agents: AgentClient, amphora_id: str, address: str | None) -> dict[str, Any]:
    """What an amphora has, whatever the version of its agent."""
    deadline = Deadline(_COMPARING, f"compare amphora {amphora_id}")
    try:
        return agents.configuration(amphora_id, str(address), deadline=deadline)
    except AgentRefused as error:
        if error.status != _NOT_FOUND:
            raise
        return config_diff.of_diagnostics(agents.diagnostics(amphora_id, str(address), deadline=deadline))
