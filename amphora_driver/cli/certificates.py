# SPDX-License-Identifier: Apache-2.0
"""Commands about the certificates of amphorae and the CAs that sign them.

Invariant: no command shows a private key. `ca rotate` records the request and returns; the controllers perform
the rotation. `ca list` shows the progress and the amphorae that the rotation waits for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from amphora_driver.certificates import ca_rotation, trust_store
from amphora_driver.certificates.ca import fingerprint
from amphora_driver.cli.command import Lister, PagedLister, ShowOne, Table, argument
from amphora_driver.cli.formatting import Timestamp, Value
from amphora_driver.database.vault import Vault
from amphora_driver.errors import CertificateError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind, CaRecord, CaState

# Maximum number of amphora ids in one field of a table.
_MAX_LISTED = 3
_CERTIFICATES = (*("Amphora", "Load balancer", "Issued", "Expires", "Days left", "Authority", "Trusts", "State"), "Why")
_AUTHORITIES = (
    *("ID", "Kind", "State", "Fingerprint", "Created", "Expires", "Days left", "Amphorae", "Waits for"),
    "Waiting amphorae",
)


class AmphoraIds(Value):
    """Ids of amphorae: the first ones in a table, all of them in JSON."""

    def _text(self) -> str:
        more = len(self._value) - _MAX_LISTED
        return "\n".join(self._value[:_MAX_LISTED]) + (f"\nand {more} others" if more > 0 else "")

    def _data(self) -> list[str]:
        return list(self._value)


class ListCertificates(PagedLister):
    """List the certificates of amphorae, next expiry first: CA, expiry and state of each.

    States: `fine`: the renewal is not due. `due`: the renewal follows soon. `overdue`: the renewal is late. `expired`:
    the certificate has expired and is renewed when the amphora is reachable.
    """

    arguments = (
        argument("--loadbalancer", metavar="ID", help="Only certificates of the load balancer with this id."),
        argument(
            "--state",
            choices=("fine", "due", "overdue", "expired"),
            action="append",
            help="Only certificates in this state; can be repeated.",
        ),
    )

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        now = self.app.database.now()
        recorded = self.app.read(ca_records.list_cas)
        held: tuple[AmphoraCertificate, ...] = self.app.read(ca_records.list_amphora_certificates)
        options = self.app.conf.amp_certificates
        validity = options.validity_days * ca_rotation.DAY
        lifetime = ca_rotation.CertificateLifetime(validity=validity, renew_at=options.renew_at)

        def rows() -> Iterator[tuple[Any, ...]]:
            for one in held:
                desired = _desired_trust(one, recorded)
                state = ca_rotation.certificate_state(one, desired, lifetime, now)
                if parsed_args.loadbalancer and one.load_balancer_id != parsed_args.loadbalancer:
                    continue
                if parsed_args.state and state not in parsed_args.state:
                    continue
                yield (
                    *(one.amphora_id, one.load_balancer_id, Timestamp(one.issued_at), Timestamp(one.expires_at)),
                    *(_days_left(one.expires_at, now), one.authority, one.trusts, state),
                    ca_rotation.renewal_reason(one, desired, lifetime, now),
                )

        return _CERTIFICATES, self.page(rows(), parsed_args)


class ListCertificateAuthorities(Lister):
    """List the CAs of amphorae and of controllers, and the amphorae that a rotation waits for.

    A CA without an ID is a file of the configuration. A CA has these states in this order: next (trusted, signs
    nothing), current (signs), former (trusted, signs nothing), leaving (amphorae remove it from their trust), gone.
    """

    arguments = (argument("--all", action="store_true", help="Include CAs in the state gone."),)

    def take_action(self, parsed_args: argparse.Namespace) -> Table:
        now = self.app.database.now()
        recorded = self.app.read(lambda connection: ca_records.list_cas(connection, gone=parsed_args.all))
        held: tuple[AmphoraCertificate, ...] = self.app.read(ca_records.list_amphora_certificates)
        return _AUTHORITIES, self._rows(recorded, held, now)

    def _rows(
        self, recorded: tuple[CaRecord, ...], held: tuple[AmphoraCertificate, ...], now: float
    ) -> Iterator[tuple[Any, ...]]:
        for kind in CaKind:
            of_kind = [one for one in recorded if one.kind is kind]
            if all(one.state is CaState.GONE for one in of_kind):
                yield self._configured_row(kind, held, now)
            phase = ca_rotation.rotation_phase(kind, of_kind, held, now, self.app.conf.amp_certificates.settle)
            for one in of_kind:
                moves = one.state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING)
                yield (
                    *(one.id, kind.value, one.state.value, fingerprint(one.certificate)),
                    *(Timestamp(one.created_at), Timestamp(one.expires_at), _days_left(one.expires_at, now)),
                    *(sum(_depends_on(each, one) for each in held), phase.reason if moves else ""),
                    AmphoraIds(phase.waits_for if moves else ()),
                )

    def _configured_row(self, kind: CaKind, held: tuple[AmphoraCertificate, ...], now: float) -> tuple[Any, ...]:
        found, problem = None, ""
        try:
            found = trust_store.load_configured_ca(self.app.conf, kind)
        except CertificateError as error:
            # The user of amphoractl may have no access to the CA files. So the command shows the error in the row of
            # this CA and does not fail.
            problem = str(error)
        end = found.expires_at if found else None
        about = (fingerprint(found.certificate) if found else "", Timestamp(None), Timestamp(end), _days_left(end, now))
        return (None, kind.value, "current", *about, len(held), problem, AmphoraIds(()))


class RotateCertificateAuthority(ShowOne):
    """Replace a CA without an interruption of the connections between controllers and agents.

    The controllers rotate in steps: all sides trust both CAs; the new CA signs all certificates; all sides trust only
    the new CA; the old key is erased. `ca list` shows the progress. A second rotation cannot begin before the
    first has ended. The first rotation reads the configured CA certificate: run the command on a controller.
    """

    arguments = (
        argument(
            "--kind",
            choices=[one.value for one in CaKind],
            required=True,
            help="amphora: signs the agents' certificates. controller: signs the controllers' client certificates.",
        ),
        argument("--days", type=int, default=3650, help="Validity of the new CA in days (default: 3650)."),
    )

    def values(self, parsed_args: argparse.Namespace) -> dict[str, Any]:
        conf, database, kind = self.app.conf, self.app.database, CaKind(parsed_args.kind)
        vault = Vault.load(conf.amp_database.encryption_key_file)
        # A CA in the database replaces the configured CA files. So the files are read only before the first rotation.
        rotated = any(one.kind is kind for one in self.app.read(ca_records.list_cas))
        new = trust_store.create_ca(kind, vault, parsed_args.days)
        present = new if rotated else trust_store.load_configured_ca(conf, kind)
        now = database.now()
        number = database.write(lambda connection: ca_records.begin_ca_rotation(connection, kind, present, new, now))
        return {
            "ID": number,
            "Kind": kind.value,
            "State": CaState.NEXT.value,
            "Fingerprint": fingerprint(new.certificate),
            "Expires": Timestamp(new.expires_at),
        }


def _desired_trust(one: AmphoraCertificate, recorded: tuple[CaRecord, ...]) -> ca_rotation.DesiredTrust:
    """Return the desired trust of an amphora. CAs in files count as present, even if not readable."""
    ids = [each.id for each in recorded if each.kind is CaKind.CONTROLLER and each.state in ca_records.TRUSTED_STATES]
    signer = [each.id for each in recorded if each.kind is CaKind.AMPHORA and each.state is CaState.CURRENT]
    return ca_rotation.DesiredTrust(
        authority=signer[0] if signer else one.authority,
        trusts=ca_rotation.format_trusts(ids, b"", None) if ids else one.trusts or "files-",
    )


def _depends_on(one: AmphoraCertificate, authority: CaRecord) -> bool:
    """Whether the connections between an amphora and the controllers need this CA."""
    if authority.kind is CaKind.AMPHORA:
        return one.authority == authority.id
    trusted = ca_rotation.parse_controller_ids(one.trusts)
    # An amphora without a list of trusted CAs trusts the CA of the configured files. The database has no private key of
    # that CA.
    return authority.id in trusted or (authority.sealed_key is None and not trusted)


def _days_left(until: float | None, now: float) -> float | None:
    return None if until is None else round((until - now) / ca_rotation.DAY, 1)
