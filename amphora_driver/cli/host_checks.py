# SPDX-License-Identifier: Apache-2.0
"""What this host has to have for the control plane: keys, files, sockets, backends, a broker.

Invariant: every question is bounded, changes nothing, and has an answer: whatever goes wrong is a finding. What only
hosts of another kind need is no failure here.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from cryptography import x509

from amphora_driver.cli import id_prefix, status_checks
from amphora_driver.cli.status_checks import Check, failure, warning, well
from amphora_driver.database.tables import work
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.maintenance import reencryption
from amphora_driver.plugins import Catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database

# Seconds for the broker's and a socket's answer.
_PATIENCE = 5.0
# What asks Octavia's agent for nothing. Something has to be sent: its handler never notices that a connection that said
# nothing was closed, and keeps a processor busy for good.
_NOTHING = {
    "status": b"{}",
    "stats": b'{"listeners": []}',
    "get": b'{"object": "loadbalancers", "id": "00000000-0000-0000-0000-000000000000"}',
}
_PATHS = ("ca_certificate", "client_ca", "client_certificate")


def keys(conf: ConfigOpts, database: Database) -> Check:
    """Whether every secret can be opened with the keys of this host."""
    try:
        vault = Vault.load(conf.store.encryption_key_file)
        counts = reencryption.count_key_usage(database, vault)
    except AmphoraDriverError as error:
        return failure("Keys", f"{error}")
    lost = sum(one.rows for one in counts if one.key is None)
    old = sum(one.rows for one in counts if one.key not in (0, None))
    total = sum(one.rows for one in counts)
    if lost:
        words = f"{lost} of {total} secrets fit no key of {conf.store.encryption_key_file}"
        return failure("Keys", f"{words}. Put the key back that sealed them; see: amphoractl secrets status.")
    misplaced = sum(one.misplaced for one in counts)
    if misplaced:
        words = f"{misplaced} of {total} secrets were sealed for other rows, and are not opened"
        return failure("Keys", f"{words}. Restrict write access to the database; see: amphoractl secrets status.")
    unbound = sum(one.unbound for one in counts)
    if unbound:
        words = f"{unbound} of {total} secrets are not bound to their rows, and are not opened"
        return failure("Keys", f"{words}. Run once: amphoractl secrets reseal --bind (docs/explanation/secrets.md).")
    if old:
        return warning(
            "Keys", f"{old} of {total} secrets are sealed with an older key. Run: amphoractl secrets reseal."
        )
    return well("Keys", f"{total} secrets, sealed with the newest of {len(vault.fingerprints)} keys")


def authorities(conf: ConfigOpts, rows: Sequence[Any], now: float) -> Check:
    """Certificates of the configuration's files, and of the authorities that were rotated.

    Args:
        conf: our options.
        rows: of the table `authority`, without those that are gone.
        now: seconds since 1970.
    """
    found = {f"authority {row.id} ({row.kind}, {row.state})": float(row.expires_at) for row in rows}
    missing = []
    for option in _PATHS:
        path = Path(conf.certificates[option])
        try:
            found[str(path)] = _ends(path.read_bytes())
        except OSError as error:
            missing.append(f"{path}: {error.strerror}")
        except ValueError as error:
            return failure(
                "Authorities", f"{path} is no PEM certificate ({error}). Put it right: [certificates] {option}."
            )
    if missing:
        words = "; ".join(missing)
        return warning("Authorities", f"not on this host: {words}. Controllers and this program need them.")
    return status_checks.of_authorities(found, now)


def backends(conf: ConfigOpts, database: Database) -> Check:
    """Whether what load balancers are with, or would be with, is installed here."""
    catalogue = Catalogue(conf, database)
    used = sa.select(work.c.topology, work.c.compute, work.c.network).where(id_prefix.IS_LOAD_BALANCER).distinct()
    rows = [tuple(row) for row in database.read(lambda connection: connection.execute(used).all())]
    wrong, found = [], set()
    for topology, compute, network in [*rows, (conf.controller.loadbalancer_topology, None, None)]:
        try:
            catalogue.topology(topology)
            catalogue.network(network)
            catalogue.compute(compute, network)
        except AmphoraDriverError as error:
            wrong.append(str(error))
        found |= {topology, compute or conf.compute.driver, network or conf.network.driver}
    if wrong:
        return failure("Backends", " ".join(dict.fromkeys(wrong)))
    return well("Backends", ", ".join(sorted(found)))


def sockets(conf: ConfigOpts, *, elsewhere: bool, here: bool) -> Check:
    """Octavia's sockets.

    Args:
        conf: our options.
        elsewhere: a provider agent lives on some host.
        here: one lives, or should, on this one.
    """
    asked = ((conf.octavia[f"{name}_socket"], document) for name, document in _NOTHING.items())
    wrong = [words for path, document in asked if (words := _unanswered(path, document))]
    if not wrong:
        return well("Octavia's sockets", "all three answer")
    words = "; ".join(wrong)
    if elsewhere and not here:
        return well("Octavia's sockets", "not on this host; a provider agent on another one has them")
    return failure("Octavia's sockets", f"{words}. Start octavia-driver-agent, or correct [octavia] *_socket.")


def doorbells(conf: ConfigOpts) -> Check:
    """Where processes of this host wake each other."""
    path = Path(conf.queue.doorbell_dir)
    if not path.is_dir():
        words = f"{path} is not there: changes wait up to {conf.queue.poll_interval:.0f} s"
        return warning("Doorbells", f"{words}. Start a service, which makes it, or correct [queue] doorbell_dir.")
    if not os.access(path, os.W_OK | os.X_OK):
        return warning("Doorbells", f"{path} is closed to this user. Run this as the user of the services.")
    return well("Doorbells", str(path))


def broker(conf: ConfigOpts) -> Check:
    """Whether hints can be published; only a few seconds are waited for that."""
    if conf.queue.engine == "embedded":
        return well("Broker", "none is configured: other hosts look by themselves")
    answer: list[str | None] = []
    asking = threading.Thread(target=lambda: answer.append(_published(conf.queue.broker_url)), daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if not answer:
        words = f"no answer in {_PATIENCE:.0f} s"
    elif answer[0] is None:
        return well("Broker", "it answers")
    else:
        words = answer[0]
    remedy = f"Look at RabbitMQ; without it changes wait up to {conf.queue.poll_interval:.0f} s."
    return warning("Broker", f"{words}. {remedy}")


def bounded(name: str, question: Callable[[], Check]) -> Check:
    """The answer to a question, also where it goes wrong in a way nobody has thought of."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - one question that cannot be asked hides no other answer
        return failure(name, f"could not be looked at: {type(error).__name__}: {error}")


def _ends(pem: bytes) -> float:
    return min(one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(pem))


def _unanswered(path: str, document: bytes) -> str | None:
    """What is wrong with a socket of Octavia's agent; None if it answers."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return f"{path} is no socket"
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_PATIENCE)
            asking.connect(path)
            # Its length in decimal digits, a new line, and the document: in one piece.
            asking.sendall(b"%d\n%s" % (len(document), document))
            return None if asking.recv(1) else f"{path} hangs up"
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def _published(url: str) -> str | None:
    """Connect to the broker; what was wrong, without its password."""
    try:
        from amphora_driver.queue import rabbitmq as celery_broker  # noqa: PLC0415 - only several hosts have it installed

        connection = celery_broker.create_celery_app(url).connection_for_write()
    except ImportError as error:
        return f"{error.name} is not installed"
    try:
        connection.ensure_connection(max_retries=1, timeout=int(_PATIENCE))
    except Exception as error:  # noqa: BLE001 - every transport has its own errors
        return f"{type(error).__name__}: {error}"
    finally:
        connection.release()
    return None


def hosts_of(rows: Sequence[Any], now: float, kind: str) -> Mapping[str, bool]:
    """On which hosts processes of a kind are known, and whether one of them lives."""
    found: dict[str, bool] = {}
    for row in rows:
        if row.kind == kind:
            found[row.host] = found.get(row.host, False) or now - row.seen_at <= status_checks.GONE_AFTER
    return found
