# SPDX-License-Identifier: Apache-2.0
"""Commands that render the desired configuration, and compare, repair or diagnose amphorae.

Invariant: `diff` and `diagnose` connect to the agents with the configured certificate and change nothing. The
commands report an agent that does not answer, and continue with the other amphorae. `repair` writes rows only, so it
works while no other process runs. No command shows a secret:
the comparison uses names and digests of files, and masks secret values of a configuration on both sides. It escapes
unprintable characters, so an amphora cannot add lines.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import ipaddress
import json
import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from amphora_driver.agent.client import AgentClient
from amphora_driver.certificates.trust_store import TrustStore
from amphora_driver.cli import queries
from amphora_driver.cli.command import AMPHORA, LOAD_BALANCER, Command, argument
from amphora_driver.cli.formatting import escape_unprintable
from amphora_driver.database.rows import plain_columns
from amphora_driver.database.tables import amphora, amphora_heartbeat, job
from amphora_driver.database.vault import Vault
from amphora_driver.deadline import Deadline
from amphora_driver.errors import AgentError, AgentRefused, Conflict
from amphora_driver.maintenance.drift_audit import load_record
from amphora_driver.plugins import Catalogue
from amphora_driver.queue import local_socket
from amphora_driver.reconcile import defaults
from amphora_driver.reconcile.desired_bundle import build_bundles
from amphora_driver.render import haproxy
from amphora_driver.store import config_drift, desired_objects
from amphora_driver.store.generations import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amphora_driver.model.loadbalancer import LoadBalancer

# Time-outs in seconds for the comparison and for the diagnosis of one amphora.
_COMPARE_TIMEOUT, _DIAGNOSE_TIMEOUT = 20.0, 60.0
_NOT_FOUND = 404
DIFFERENT, UNREACHABLE = 1, 2
# In `GET /v2/diagnostics`, the agent masks the values after these keywords. So the comparison masks these values in the
# desired configuration too.
_SECRET_WORDS = re.compile(r"\b(dynamic-cookie-key|password|insecure-password)([ \t]+)\S+")
# The line in haproxy.cfg between the agent's part and the load balancer's part.
_END_OF_AGENT_PART = "# From here on: the load balancer's part.\n"
_COMPARED = ("files", "interfaces", "limits", "allowed", "pings", "vrrp", "virtual_servers")


class RenderLoadBalancer(Command):
    """Print the haproxy.cfg that is rendered from the recorded load balancer."""

    arguments = (LOAD_BALANCER,)

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print the file; return 1 if a part of the load balancer cannot be rendered."""

        def load(connection: sa.Connection) -> LoadBalancer:
            chosen = queries.find_load_balancer_id(connection, parsed_args.load_balancer)
            return desired_objects.load_tree(connection, chosen)

        tree = self.app.read(load)
        rendered = haproxy.render(tree, defaults=defaults.rendering_defaults(self.app.conf), shared_tickets=True)
        self.app.stdout.write(rendered.text if rendered.text is not None else "# This load balancer needs no HAProxy\n")
        for refusal in rendered.refused:
            self.app.stderr.write(f"{escape_unprintable(str(refusal))}\n")
        return 1 if rendered.refused else 0


class DiffLoadBalancer(Command):
    """Compare the desired state of a load balancer with the configuration of each amphora.

    Prints a unified diff of HAProxy's configuration and of the rest of the bundle. Exit status 0: no difference. 1: at
    least one difference. 2: at least one amphora did not answer.
    """

    arguments = (LOAD_BALANCER,)

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print the differences of every amphora; return the exit status."""
        catalogue, vault = Catalogue(self.app.conf, self.app.database), _vault(self.app)
        chosen = self.app.read(lambda connection: queries.find_load_balancer_id(connection, parsed_args.load_balancer))
        recorded = self.app.read(lambda connection: load_record(connection, chosen, catalogue))
        if recorded is None:
            happened = "it is being created or deleted"
            raise Conflict(f"compare load balancer {chosen}", happened, "Repeat the command after that.")
        wanted = {one: json.loads(body) for one, body in build_bundles(recorded, self.app.conf, vault).items()}
        agents = _agents(self.app, vault)
        status = 0
        with closing(agents):
            for one in recorded.amphorae:
                try:
                    actual = _read_configuration(agents, one.id, one.management_address)
                except AgentError as error:
                    self.app.stderr.write(f"{escape_unprintable(str(error))}\n")
                    status = UNREACHABLE
                    continue
                lines = list_differences(one.id, wanted[one.id], actual)
                self.app.stdout.writelines(f"{line}\n" for line in lines)
                status = max(status, DIFFERENT if lines else 0)
        return status


class RepairLoadBalancer(Command):
    """Send the configuration to every amphora of a load balancer again."""

    arguments = (LOAD_BALANCER,)

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        def write(connection: sa.Connection) -> tuple[str, list[str]]:
            chosen = queries.find_load_balancer_id(connection, parsed_args.load_balancer)
            op = connection.execute(sa.select(job.c.op).where(job.c.load_balancer_id == chosen)).scalar_one()
            if op != Op.APPLY:
                raise Conflict(f"repair load balancer {chosen}", "it is being deleted", "No action is needed.")
            reason = "operator: the configuration is sent again"
            return chosen, config_drift.revoke_all_confirmations(connection, chosen, reason)

        chosen, amphorae = self.app.database.write(write)
        local_socket.wake_role(self.app.conf.amp_queue.socket_dir, local_socket.CONTROLLER)
        listed = ", ".join(amphorae) or "none has confirmed a configuration yet"
        self.app.stdout.write(
            f"Load balancer {chosen} is due. A controller sends the complete configuration to its amphorae again: "
            f"{listed}.\nClients are served meanwhile. Check the result with: amphoractl loadbalancer diff {chosen}\n"
        )


class DiagnoseAmphora(Command):
    """Fetch the diagnostics of an amphora as one JSON document without secrets."""

    arguments = (
        AMPHORA,
        argument("--output", metavar="FILE", type=Path, help="File to write; default: standard output."),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        """Print the document; return 2 if the amphora does not answer and only its database row is printed."""
        chosen, row = self.app.read(lambda connection: _read_row(connection, parsed_args.amphora))
        found: dict[str, Any] | None = None
        with closing(_agents(self.app, _vault(self.app))) as agents:
            try:
                if row["management_address"] is None:
                    self.app.stderr.write(f"amphora {chosen} has no address: its machine does not exist (yet)\n")
                else:
                    deadline = Deadline(_DIAGNOSE_TIMEOUT, f"diagnose amphora {chosen}")
                    found = agents.diagnostics(chosen, row["management_address"], deadline=deadline)
            except AgentError as error:
                self.app.stderr.write(f"{escape_unprintable(str(error))}\n")
        if found is None:
            self.app.stderr.write("The amphora did not answer; the output contains its database row only.\n")
        text = json.dumps({"recorded": row, **({} if found is None else {"agent": found})}, indent=1, default=str)
        if parsed_args.output is None:
            self.app.stdout.write(f"{text}\n")
        else:
            parsed_args.output.write_text(f"{text}\n", encoding="utf-8")
            self.app.stdout.write(f"{parsed_args.output}\n")
        return 0 if found is not None else UNREACHABLE


def _read_row(connection: sa.Connection, text: str) -> tuple[str, Mapping[str, Any]]:
    chosen = queries.find_amphora_id(connection, text)
    columns = plain_columns(amphora, "heartbeat_key")
    seen = amphora_heartbeat.c
    heard = (seen.seen_at, seen.generation.label("heard_generation"), seen.holds_vip)
    together = amphora.outerjoin(amphora_heartbeat, seen.amphora_id == amphora.c.id)
    query = sa.select(*columns, *heard).select_from(together).where(amphora.c.id == chosen)
    return chosen, dict(connection.execute(query).mappings().one())


def _vault(app: Any) -> Vault:
    return Vault.load(app.conf.amp_database.encryption_key_file)


def _agents(app: Any, vault: Vault) -> AgentClient:
    return AgentClient(app.conf, TrustStore(app.conf, app.database, vault))


def _read_configuration(agents: AgentClient, amphora_id: str, address: str | None) -> dict[str, Any]:
    """Return the configuration of an amphora. An old agent has this document in its diagnostics only."""
    deadline = Deadline(_COMPARE_TIMEOUT, f"compare amphora {amphora_id}")
    try:
        return agents.configuration(amphora_id, str(address), deadline=deadline)
    except AgentRefused as error:
        if error.status != _NOT_FOUND:
            raise
        return from_diagnostics(agents.diagnostics(amphora_id, str(address), deadline=deadline))


def mask_secrets(text: str) -> str:
    """Return a configuration with `***` in place of each secret."""
    return _SECRET_WORDS.sub(r"\1\2***", text)


def from_diagnostics(actual: dict[str, Any]) -> dict[str, Any]:
    """Convert the diagnostics of an old agent to the document of `GET /v2/configuration`."""
    text = actual.get("haproxy.cfg")
    interfaces = actual.get("interfaces")
    return {
        "generation": actual.get("generation"),
        "haproxy": text.partition(_END_OF_AGENT_PART)[2] if isinstance(text, str) else None,
        "interfaces": interfaces if isinstance(interfaces, list) else [],
    }


def list_differences(amphora_id: str, desired: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return lines that describe the differences between the desired bundle and the agent's answer."""
    lines = []
    if desired["generation"] != actual.get("generation"):
        lines.append(f"generation: wanted {desired['generation']}, amphora {amphora_id} has {actual.get('generation')}")
    files = (mask_secrets(one.get("haproxy") or "") for one in (desired, actual))
    lines += _unified("haproxy.cfg", amphora_id, *files)
    bundle = actual.get("bundle")
    if isinstance(bundle, dict):
        lines += _unified("bundle", amphora_id, _canonical_text(_as_stored(desired)), _canonical_text(bundle))
    for one in desired["interfaces"]:
        lines += _interface(one, actual.get("interfaces"), is_pair=desired["vrrp"] is not None)
    drift = actual.get("drift")
    if isinstance(drift, dict) and drift.get("unrepaired"):
        found = (drift.get("last") or {}).get("sentences") or drift["unrepaired"]
        lines += [f"the agent cannot repair: {one}" for one in found]
    return [escape_unprintable(line, "\t") for line in lines]


def _unified(what: str, amphora_id: str, desired: str, actual: str) -> list[str]:
    names = (f"{what} wanted", f"{what} of amphora {amphora_id}")
    return list(difflib.unified_diff(desired.splitlines(), actual.splitlines(), *names, lineterm=""))


def _as_stored(desired: dict[str, Any]) -> dict[str, Any]:
    """Return the bundle as an agent stores it: with digests in place of contents."""
    digests = [(one["name"], hashlib.sha256(one["content"].encode()).hexdigest()) for one in desired["files"]]
    return {**desired, "files": [{"name": name, "sha256": digest} for name, digest in digests]}


def _canonical_text(bundle: dict[str, Any]) -> str:
    return json.dumps({name: _canonical(bundle.get(name)) for name in _COMPARED}, indent=1, sort_keys=True)


def _canonical(value: Any) -> Any:
    """Return the value with addresses, networks and numbers in their canonical form."""
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, str):
        return _canonical_address(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _canonical_address(text: str) -> str:
    try:
        return str(ipaddress.ip_interface(text) if "/" in text else ipaddress.ip_address(text))
    except ValueError:
        return text


def _interface(desired: dict[str, Any], actual: Any, *, is_pair: bool) -> list[str]:
    """Return the differences between the desired interface and the kernel's."""
    name = desired["name"]
    if not isinstance(actual, list):
        return [f"interface {name}: the agent does not report it"]
    found = next((one for one in actual if one.get("mac") == desired["mac"].lower()), None)
    if found is None:
        return [f"interface {name} ({desired['mac']}) is gone"]
    lines = [] if found.get("up") else [f"interface {name} is down"]
    if found.get("name") != name:
        lines.append(f"interface {name} has the name {found.get('name')}")
    if found.get("mtu") != desired["mtu"]:
        lines.append(f"interface {name} has an MTU of {found.get('mtu')}, not {desired['mtu']}")
    # VRRP decides which amphora of a pair holds the VIPs. So only an amphora without a partner must have the VIPs.
    needed = [*desired["addresses"], *([] if is_pair else desired["vips"])]
    present = {_canonical_address(one) for one in found.get("addresses", [])}
    return lines + [f"interface {name} lacks {one}" for one in needed if _canonical_address(one) not in present]
