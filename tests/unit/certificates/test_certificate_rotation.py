# SPDX-License-Identifier: Apache-2.0
"""Certificate rotation: times of renewals and conditions for the change to a new CA."""

import itertools

import pytest

from amphora_driver.certificates import ca_rotation
from amphora_driver.certificates.ca_rotation import (
    DAY,
    CertificateLifetime,
    DesiredTrust,
    common_trust,
    format_trusts,
    parse_controller_ids,
    rotation_phase,
    trust_differs,
)
from amphora_driver.store.ca_records import AmphoraCertificate, CaKind, CaRecord, CaState

NOW = 2_000_000_000.0
TERMS = CertificateLifetime(validity=7 * DAY, renew_at=0.5)
FILES = format_trusts((), b"controllers", b"signer")


def held(number=0, *, age=0.0, authority=None, trusts=FILES, **more):
    values = {"issued_at": NOW - age * DAY, "expires_at": NOW + (7 - age) * DAY, **more}
    return AmphoraCertificate(
        amphora_id=f"amphora-{number}", load_balancer_id="lb", ready=True, authority=authority, trusts=trusts, **values
    )


def recorded(number, state, kind=CaKind.CONTROLLER, changed_at=NOW - 1000):
    return CaRecord(
        id=number, kind=kind, state=state, certificate=b"", sealed_key=b"",
        created_at=0.0, changed_at=changed_at, expires_at=0.0,
    )  # fmt: skip


def test_trusted_cas_are_formatted_as_pem():
    assert format_trusts([2, 1], b"ignored", None) == "1,2"
    assert format_trusts([2, 1], b"ignored", b"signer").startswith("1,2/")
    assert format_trusts((), b"one", None).startswith("files-")
    assert format_trusts((), b"one", b"x") != format_trusts((), b"two", b"x") != format_trusts((), b"two", b"y")
    assert parse_controller_ids("1,2/abc") == {1, 2}
    assert parse_controller_ids(FILES) == parse_controller_ids(None) == parse_controller_ids("unknown") == frozenset()


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (None, "1,2", "1,2"),
        ("1,2", "1,2", "1,2"),
        ("1", "1,2", "1"),
        ("1,2", "2", "2"),
        (FILES, "1,2", "unknown"),
        ("1", "2", "unknown"),
    ],
)
def test_the_common_cas_of_two_boots_are_trusted(first, second, both):
    assert common_trust(first, second) == both


@pytest.mark.parametrize(
    ("has", "wanted", "other"),
    [
        (None, FILES, False),  # older than the record: the amphora has the CAs of the files
        (None, "1,2", True),
        (FILES, FILES, False),
        (format_trusts((), b"exchanged", b"signer"), FILES, True),
        (format_trusts((), b"controllers", b"exchanged"), FILES, True),
        (
            FILES,
            format_trusts((), b"controllers", None),
            False,
        ),  # the database records the signer meanwhile; its id identifies it
        ("1", "1,2", True),
        ("1,2", "1,2", False),
        ("1,2", "2", True),
        ("unknown", "2", True),
    ],
)
def test_an_amphora_trusts_the_cas_of_each_stage(has, wanted, other):
    assert trust_differs(has, DesiredTrust(authority=None, trusts=wanted)) is other


@pytest.mark.parametrize(
    ("one", "wanted", "words", "state"),
    [
        (held(age=0), None, "", "fine"),
        (held(age=3.1), None, "", "fine"),
        (held(age=3.9), None, "reached its renewal time", "due"),
        (held(age=6.9), None, "reached its renewal time", "overdue"),
        (held(age=7.1), None, "expired", "expired"),
        (held(age=3.9, issued_at=None), None, "reached its renewal time", "due"),  # issued 7 days before its end
        (held(age=1, issued_at=None), None, "", "fine"),
        (held(issued_at=None, expires_at=None), None, "expiry of its certificate is not known", "due"),
        (held(authority=None), DesiredTrust(authority=2, trusts=FILES), "another authority", "due"),
        (held(authority=1), DesiredTrust(authority=2, trusts=FILES), "another authority", "due"),
        (held(trusts="1"), DesiredTrust(authority=None, trusts="1,2"), "other authorities", "due"),
    ],
)
def test_a_certificate_is_renewed_before_its_end(one, wanted, words, state):
    wanted = wanted or DesiredTrust(authority=None, trusts=FILES)
    said = ca_rotation.renewal_reason(one, wanted, TERMS, NOW)
    assert words in said
    assert bool(said) is bool(words)
    assert ca_rotation.certificate_state(one, wanted, TERMS, NOW) == state


def test_renewals_of_equal_age_are_spread():
    moments = sorted(ca_rotation.renewal_due_at(held(number), TERMS) - NOW for number in range(1000))
    assert moments[0] > 0.45 * 7 * DAY - 60
    assert moments[-1] < 0.55 * 7 * DAY + 60
    hours = [len(list(group)) for _, group in itertools.groupby(moments, lambda one: one // 3600)]
    assert max(hours) < 150, "a thousand renewals within seventeen hours"
    late = CertificateLifetime(validity=DAY, renew_at=0.99)
    assert ca_rotation.renewal_due_at(held(0), late) < NOW + 7 * DAY


CONTROLLERS = [
    # CAs, trusted CAs of amphorae, the step, the amphorae for which it waits
    ([(1, CaState.CURRENT)], ["1"], {}, 0),
    ([(1, CaState.CURRENT), (2, CaState.NEXT)], ["1"], {}, 1),
    ([(1, CaState.CURRENT), (2, CaState.NEXT)], ["1,2", FILES], {}, 1),
    ([(1, CaState.CURRENT), (2, CaState.NEXT)], ["1,2", None], {}, 1),
    ([(1, CaState.CURRENT), (2, CaState.NEXT)], ["1,2"], {1: CaState.FORMER, 2: CaState.CURRENT}, 0),
    ([(1, CaState.FORMER), (2, CaState.CURRENT)], ["1,2"], {1: CaState.LEAVING}, 0),
    ([(1, CaState.LEAVING), (2, CaState.CURRENT)], ["1,2", "2"], {}, 1),
    ([(1, CaState.LEAVING), (2, CaState.CURRENT)], ["unknown"], {}, 1),
    ([(1, CaState.LEAVING), (2, CaState.CURRENT)], ["2", "2/abc"], {1: CaState.GONE}, 0),
    ([], [FILES], {}, 0),
]


@pytest.mark.parametrize(("states", "trusted", "moves", "waits"), CONTROLLERS)
def test_controller_ca_advances_after_all_confirmations(states, trusted, moves, waits):
    rows = [recorded(*one) for one in states]
    everyone = [held(number, trusts=text) for number, text in enumerate(trusted)]
    found = rotation_phase(CaKind.CONTROLLER, rows, everyone, NOW, 90.0)
    assert {one.id: state for one, state in found.moves.items()} == moves
    assert len(found.waits_for) == waits
    assert rotation_phase(CaKind.AMPHORA, rows, everyone, NOW, 90.0) == ca_rotation.RotationPhase(), (
        "the step does not depend on amphorae with the other kind of CA"
    )


AMPHORAE = [
    ([(1, CaState.CURRENT), (2, CaState.NEXT)], [None], {1: CaState.FORMER, 2: CaState.CURRENT}, 0),
    ([(1, CaState.FORMER), (2, CaState.CURRENT)], [1, 2, None], {}, 2),
    ([(1, CaState.FORMER), (2, CaState.CURRENT)], [2, 2], {1: CaState.LEAVING}, 0),
    ([(1, CaState.LEAVING), (2, CaState.CURRENT)], [1], {}, 1),
    ([(1, CaState.LEAVING), (2, CaState.CURRENT)], [2], {1: CaState.GONE}, 0),
]


@pytest.mark.parametrize(("states", "signed", "moves", "waits"), AMPHORAE)
def test_the_amphora_ca_advances_after_the_new_ca_has_signed_all(states, signed, moves, waits):
    rows = [recorded(*one, CaKind.AMPHORA) for one in states]
    everyone = [held(number, authority=one) for number, one in enumerate(signed)]
    found = rotation_phase(CaKind.AMPHORA, rows, everyone, NOW, 90.0)
    assert {one.id: state for one, state in found.moves.items()} == moves
    assert len(found.waits_for) == waits


@pytest.mark.parametrize(("states", "trusted", "moves", "_waits"), CONTROLLERS)
def test_a_step_lasts_at_least_as_long_as_the_cache_of_the_previous_one(states, trusted, moves, _waits):
    rows = [recorded(*one, changed_at=NOW - 80) for one in states]
    everyone = [held(number, trusts=text) for number, text in enumerate(trusted)]
    assert rotation_phase(CaKind.CONTROLLER, rows, everyone, NOW, 90.0).moves == {}
    found = rotation_phase(CaKind.CONTROLLER, rows, everyone, NOW + 10, 90.0).moves
    assert {one.id: state for one, state in found.items()} == moves
