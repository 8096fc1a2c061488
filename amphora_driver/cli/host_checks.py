# SPDX-License-Identifier: Apache-2.0
"""Checks of this host: keys, files, sockets, backends, the message broker and Octavia's API.

Invariant: every check has a time limit, changes nothing and returns a result; an exception is a failed check. A check
does not fail because of a part that only another kind of host needs.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa
from cryptography import x509

from amphora_driver.cli import queries, status_checks
from amphora_driver.cli.formatting import format_duration
from amphora_driver.cli.status_checks import Check, failure, success, warning
from amphora_driver.database.tables import job
from amphora_driver.database.vault import Vault
from amphora_driver.errors import AmphoraDriverError
from amphora_driver.maintenance import reencryption
from amphora_driver.openstack import octavia, session
from amphora_driver.plugins import Catalogue
from amphora_driver.telemetry.alerts import MONTH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database

# Time-out in seconds of one answer of RabbitMQ, of a socket of octavia-driver-agent, or of Octavia's API.
_TIMEOUT = 5.0
# Longest length of an answer of octavia-driver-agent, in digits.
_MOST_DIGITS = 6
# Requests that change nothing. A check always sends a request, because octavia-driver-agent reads forever from a
# connection that closes without a request.
_EMPTY_REQUESTS = {
    "status": b"{}",
    "stats": b'{"listeners": []}',
    "get": b'{"object": "loadbalancers", "id": "00000000-0000-0000-0000-000000000000"}',
}
_CERTIFICATE_OPTIONS = ("ca_certificate", "client_ca", "client_certificate")


def check_keys(conf: ConfigOpts, database: Database) -> Check:
    """Check that the keys of this host decrypt every secret."""
    try:
        vault = Vault.load(conf.amp_database.encryption_key_file)
        counts = reencryption.count_key_usage(database, vault)
    except AmphoraDriverError as error:
        return failure(f"{error}")
    lost = sum(one.rows for one in counts if one.key is None)
    old = sum(one.rows for one in counts if one.key not in (0, None))
    total = sum(one.rows for one in counts)
    if lost:
        words = f"no key of {conf.amp_database.encryption_key_file} decrypts {lost} of {total} secrets"
        return failure(f"{words}. Restore the key that encrypted them; see: amphoractl secrets status.")
    misplaced = sum(one.misplaced for one in counts)
    if misplaced:
        words = f"{misplaced} of {total} secrets were encrypted for other rows and are refused"
        return failure(f"{words}. Restrict write access to the database; see: amphoractl secrets status.")
    if old:
        return warning(f"{old} of {total} secrets are encrypted with an older key. Run: amphoractl secrets reencrypt.")
    return success(f"{total} secrets, encrypted with the newest of {len(vault.fingerprints)} keys")


def check_authorities(conf: ConfigOpts, rows: Sequence[Any], now: float) -> Check:
    """Check the expiry of the configured certificates and of the CAs in the database that are not gone."""
    found = recorded_authorities(rows)
    missing = []
    for option in _CERTIFICATE_OPTIONS:
        path = Path(conf.amp_certificates[option])
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
            found[str(path)] = min(one.not_valid_after_utc.timestamp() for one in certificates)
        except OSError as error:
            missing.append(f"{path}: {error.strerror}")
        except ValueError as error:
            return failure(f"{path} is not a PEM certificate ({error}). Correct [amp_certificates] {option}.")
    if missing:
        words = "; ".join(missing)
        return warning(f"not readable on this host: {words}. Controllers and amphoractl need these files.")
    return status_checks.check_authorities(found, now)


def check_log_certificate(conf: ConfigOpts, now: float) -> Check:
    """Check the expiry of the certificate that amphorae show to log targets."""
    path = conf.amp_logs.client_certificate
    if path is None:
        return success("amphorae show no client certificate to log targets")
    try:
        certificates = x509.load_pem_x509_certificates(Path(path).read_bytes())
    except OSError as error:
        return warning(f"{path} is not readable on this host ({error.strerror}). Controllers need this file.")
    except ValueError:
        return failure(f"{path} has no PEM certificate. Correct [amp_logs] client_certificate.")
    left = min(one.not_valid_after_utc.timestamp() for one in certificates) - now
    if left <= 0:
        return failure(f"{path} has expired, so log targets may refuse amphorae. Replace the file on all controllers.")
    if left <= MONTH:
        words = format_duration(left)
        return warning(f"{path} expires in {words}. Replace the file on all controllers.")
    return success(f"{path} expires in {format_duration(left)}")


def recorded_authorities(rows: Sequence[Any]) -> dict[str, float]:
    """Return the ends of the CAs in the database (seconds since 1970), by a name for the output."""
    return {f"authority {row.id} ({row.kind}, {row.state})": float(row.expires_at) for row in rows}


def check_backends(conf: ConfigOpts, database: Database) -> Check:
    """Check that the backends of existing and new load balancers are installed."""
    catalogue = Catalogue(conf, database)
    backend_query = sa.select(job.c.topology, job.c.compute, job.c.network).where(queries.IS_LOAD_BALANCER).distinct()
    rows = [tuple(row) for row in database.read(lambda connection: connection.execute(backend_query).all())]
    wrong, found = [], set()
    for topology, compute, network in [*rows, (conf.amp_controller.loadbalancer_topology, None, None)]:
        try:
            catalogue.topology(topology)
            catalogue.network(network)
            catalogue.compute(compute, network)
        except AmphoraDriverError as error:
            wrong.append(str(error))
        found |= {topology, compute or conf.amp_compute.driver, network or conf.amp_network.driver}
    if wrong:
        return failure(" ".join(dict.fromkeys(wrong)))
    return success(", ".join(sorted(found)))


def check_octavia_sockets(conf: ConfigOpts, *, elsewhere: bool, here: bool) -> Check:
    """Check that octavia-driver-agent answers on its three sockets.

    A failure counts only if the database has a provider agent of this host, or if no host has a living one.
    """
    requests = ((conf.amp_octavia[f"{name}_socket"], document) for name, document in _EMPTY_REQUESTS.items())
    wrong = [words for path, document in requests if (words := _socket_error(path, document))]
    if not wrong:
        return success("all three answer")
    words = "; ".join(wrong)
    if elsewhere and not here:
        return success("not on this host; a provider agent runs on another host")
    return failure(f"{words}. Start octavia-driver-agent, or correct [amp_octavia] *_socket.")


def check_local_sockets(conf: ConfigOpts) -> Check:
    """Check the directory of the sockets by which processes of this host notify each other."""
    path = Path(conf.amp_queue.socket_dir)
    if not path.is_dir():
        words = f"{path} does not exist: changes wait up to {conf.amp_queue.poll_interval:.0f} s"
        return warning(f"{words}. Start a service, which creates it, or correct [amp_queue] socket_dir.")
    if not os.access(path, os.W_OK | os.X_OK):
        return warning(f"this user cannot write to {path}. Run this command as the user of the services.")
    return success(str(path))


def check_broker(conf: ConfigOpts) -> Check:
    """Check that the message broker accepts a connection within a few seconds."""
    if conf.amp_queue.engine == "embedded":
        return success("not configured: controllers of other hosts poll the database")
    answer: list[str | None] = []
    connecting = threading.Thread(target=lambda: answer.append(_broker_error(conf.amp_queue.broker_url)), daemon=True)
    connecting.start()
    connecting.join(_TIMEOUT)
    if not answer:
        words = f"no answer in {_TIMEOUT:.0f} s"
    elif answer[0] is None:
        return success("it answers")
    else:
        words = answer[0]
    remedy = f"Check RabbitMQ; without it changes wait up to {conf.amp_queue.poll_interval:.0f} s."
    return warning(f"{words}. {remedy}")


def check_provider(conf: ConfigOpts) -> Check:
    """Check that Octavia's API offers this provider; without a configured account, nothing is checked."""
    if not session.has_account(conf):
        words = "not checked: no account for Octavia's API is configured"
        return success(f"{words}. To check it, set auth_type and its options in [amp_openstack]")
    try:
        names = octavia.list_providers(conf, _TIMEOUT)
    except AmphoraDriverError as error:
        return warning(str(error))
    return status_checks.check_provider(conf.amp_octavia.provider, names)


def run_check(name: str, check: Callable[[], Check]) -> Check:
    """Return the result of a check with its name; an unexpected exception is a failure."""
    try:
        found = check()
    except Exception as error:  # noqa: BLE001 - one broken check must not hide the results of the others
        return failure(f"the check raised {type(error).__name__}: {error}. Report this as a bug.", name)
    return msgspec.structs.replace(found, name=name)


def _socket_error(path: str, document: bytes) -> str | None:
    """Return the error of a socket of octavia-driver-agent; None if it answers."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return f"{path} is not a socket"
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT)
            client.connect(path)
            # The protocol of octavia-driver-agent: the document's length in decimal digits, a newline, the document.
            client.sendall(b"%d\n%s" % (len(document), document))
            with client.makefile("rb") as answer:
                length = answer.readline(_MOST_DIGITS + 1).strip()
                # The whole answer is read, because octavia-driver-agent logs an error if the client closes before.
                received = length.isdigit() and answer.read(int(length))
            return None if received else f"{path} closed the connection without an answer"
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def _broker_error(url: str) -> str | None:
    """Connect to the broker; return the error without the password, or None."""
    # Celery itself is not imported, because its import takes a tenth of the command. Celery connects with Kombu too.
    if importlib.util.find_spec("celery") is None:
        return "celery is not installed"
    import kombu  # noqa: PLC0415 - only engine = celery needs Kombu

    connection = kombu.Connection(url, connect_timeout=_TIMEOUT)
    try:
        connection.ensure_connection(max_retries=1, timeout=int(_TIMEOUT))
    except Exception as error:  # noqa: BLE001 - each transport has its own exceptions
        return f"{type(error).__name__}: {error}"
    finally:
        connection.release()
    return None
