# SPDX-License-Identifier: Apache-2.0
"""Commands about certificates of amphorae, and the authorities that sign them.

Invariant: no private key is shown. Rotating an authority writes down what is wanted and returns: controllers do it, and
`authority list` says how far they are, and who is waited for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from cliff.columns import FormattableColumn
from cliff.lister import Lister
from cliff.show import ShowOne

from amphora_driver.certificates import ca_rotation, trust_store
from amphora_driver.certificates.ca import fingerprint
from amphora_driver.cli.formatting import Moment
from amphora_driver.database.vault import Vault
from amphora_driver.errors import CertificateError
from amphora_driver.store import ca_records
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind, CaRecord, CaState

_DAYS = 3650
# How many names a person is shown in a table.
_NAMED = 3
_CERTIFICATES = (
    *("Amphora", "Load balancer", "Issued", "Expires", "Days left", "Authority", "Trusts", "State"),
    "Why",
)
_AUTHORITIES = (
    *("ID", "Kind", "State", "Fingerprint", "Created", "Expires", "Days left", "Amphorae", "Waits for"),
    "Waiting amphorae",
)


class Names(FormattableColumn):
    """Ids of amphorae: some for a person, all for a program."""

    def human_readable(self) -> str:
        more = len(self._value) - _NAMED
        return "\n".join(self._value[:_NAMED]) + (f"\nand {more} others" if more > 0 else "")

    def machine_readable(self) -> list[str]:
        return list(self._value)


class ListCertificates(Lister):
    """Certificates of amphorae, the first to end first: by whom, until when, and whether they are renewed in time.

    `fine` is not due yet, `due` is renewed soon, `overdue` should have been long ago, `expired` is renewed when the
    amphora can be reached.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--loadbalancer", metavar="ID", help="Only those of this load balancer.")
        states = ("fine", "due", "overdue", "expired")
        parser.add_argument("--state", choices=states, action="append", help="Only those; may be repeated.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        now = self.app.database.now()
        recorded = self.app.read(ca_records.list_cas)
        held: tuple[AmphoraCertificate, ...] = self.app.read(ca_records.list_amphora_certificates)
        options = self.app.conf.certificates
        terms = ca_rotation.CertificateLifetime(
            validity=options.validity_days * ca_rotation.DAY, renew_at=options.renew_at
        )
        rows = (
            (
                one,
                ca_rotation.certificate_state(one, wanted, terms, now),
                ca_rotation.renewal_reason(one, wanted, terms, now),
            )
            for one in held
            for wanted in [_wanted(one, recorded)]
        )
        return _CERTIFICATES, (
            (
                one.amphora_id,
                one.load_balancer_id,
                Moment(one.issued_at),
                Moment(one.expires_at),
                _days(one.expires_at, now),
                one.authority,
                one.trusts,
                state,
                why,
            )
            for one, state, why in rows
            if not parsed_args.loadbalancer or one.load_balancer_id == parsed_args.loadbalancer
            if not parsed_args.state or state in parsed_args.state
        )


class ListAuthorities(Lister):
    """Authorities that vouch for amphorae and for controllers, and what the rotation of one waits for.

    One without an ID is a file of the configuration. The states are, in this order: next (trusted, signs nothing yet),
    current (signs), former (still trusted), leaving (amphorae are told to trust it no more), gone.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        parser.add_argument("--all", action="store_true", help="Also those that are gone.")
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Column names and rows."""
        now = self.app.database.now()
        everyone = self.app.read(lambda connection: ca_records.list_cas(connection, gone=parsed_args.all))
        held: tuple[AmphoraCertificate, ...] = self.app.read(ca_records.list_amphora_certificates)
        return _AUTHORITIES, self._rows(everyone, held, now)

    def _rows(
        self, everyone: tuple[CaRecord, ...], held: tuple[AmphoraCertificate, ...], now: float
    ) -> Iterator[tuple[Any, ...]]:
        for kind in CaKind:
            of_kind = [one for one in everyone if one.kind is kind]
            if all(one.state is CaState.GONE for one in of_kind):
                yield self._of_files(kind, held, now)
            phase = ca_rotation.rotation_phase(kind, of_kind, held, now, self.app.conf.certificates.settle)
            for one in of_kind:
                moves = one.state in (CaState.NEXT, CaState.FORMER, CaState.LEAVING)
                yield (
                    *(one.id, kind.value, one.state.value, fingerprint(one.certificate)),
                    *(Moment(one.created_at), Moment(one.expires_at), _days(one.expires_at, now)),
                    *(sum(_depends(each, one) for each in held), phase.reason if moves else ""),
                    Names(phase.waits_for if moves else ()),
                )

    def _of_files(self, kind: CaKind, held: tuple[AmphoraCertificate, ...], now: float) -> tuple[Any, ...]:
        try:
            found = trust_store.load_configured_ca(self.app.conf, kind)
        except CertificateError as error:
            # Whoever may ask the database may not be able to read files of the controllers.
            return (None, kind.value, "current", "", Moment(None), Moment(None), None, len(held), str(error), Names(()))
        end = found.expires_at
        about = (fingerprint(found.certificate), Moment(None), Moment(end), _days(end, now))
        return (None, kind.value, "current", *about, len(held), "", Names(()))


class RotateAuthority(ShowOne):
    """Have another authority take the place of the present one, without anybody being shut out.

    Controllers do it step by step: everybody trusts both; the new one signs everything; the old one is trusted by
    nobody any more; its key is erased. `authority list` says how far they are. It may not be begun again before it has
    ended. Needs the file of the present authority's certificate the first time: run it on a controller.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        """Options."""
        parser: argparse.ArgumentParser = super().get_parser(prog_name)
        kinds = [one.value for one in CaKind]
        parser.add_argument(
            "--kind",
            choices=kinds,
            required=True,
            help="amphora: signs the agents' certificates. controller: signs the controllers' client certificates.",
        )
        parser.add_argument(
            "--days", type=int, default=_DAYS, help=f"Days for which the new one is valid (default {_DAYS})."
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Names and values."""
        conf, database, kind = self.app.conf, self.app.database, CaKind(parsed_args.kind)
        vault = Vault.load(conf.store.encryption_key_file)
        # Once rows count, the files may be gone.
        rotated = any(one.kind is kind for one in self.app.read(ca_records.list_cas))
        new = trust_store.create_ca(kind, vault, parsed_args.days)
        present = new if rotated else trust_store.load_configured_ca(conf, kind)
        now = database.now()
        number = database.write(lambda connection: ca_records.begin_ca_rotation(connection, kind, present, new, now))
        names = ("ID", "Kind", "State", "Fingerprint", "Expires")
        return names, (
            number,
            kind.value,
            CaState.NEXT.value,
            fingerprint(new.certificate),
            Moment(new.expires_at),
        )


def _wanted(one: AmphoraCertificate, recorded: tuple[CaRecord, ...]) -> ca_rotation.DesiredTrust:
    """What an amphora is to have; what is in files, which only controllers may be able to read, it has."""
    ids = [each.id for each in recorded if each.kind is CaKind.CONTROLLER and each.state in ca_records.TRUSTED_STATES]
    signer = [each.id for each in recorded if each.kind is CaKind.AMPHORA and each.state is CaState.CURRENT]
    return ca_rotation.DesiredTrust(
        authority=signer[0] if signer else one.authority,
        trusts=ca_rotation.format_trusts(ids, b"", None) if ids else one.trusts or "files-",
    )


def _depends(one: AmphoraCertificate, authority: CaRecord) -> bool:
    """Whether an amphora could not be reached, or could not reach, if this authority were gone now."""
    if authority.kind is CaKind.AMPHORA:
        return one.authority == authority.id
    trusted = ca_rotation.parse_controller_ids(one.trusts)
    # One that was given files was given what was imported from them.
    return authority.id in trusted or (authority.sealed_key is None and not trusted)


def _days(until: float | None, now: float) -> float | None:
    return None if until is None else round((until - now) / ca_rotation.DAY, 1)
