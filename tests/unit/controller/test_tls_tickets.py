# SPDX-License-Identifier: Apache-2.0
"""TLS ticket keys are derived and not stored: three at a time; each period removes one."""

import base64

import pytest
from cryptography.fernet import Fernet

from amphora_driver.database.vault import Vault
from amphora_driver.errors import StoreError
from amphora_driver.model.secret_refs import ticket_secret_name as tickets_of
from amphora_driver.reconcile import secret_files, tls_tickets
from amphora_driver.reconcile.tls_tickets import SEED_LENGTH, create_ticket_state, rotate_ticket_state, ticket_keys
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret
from amphora_driver.store.sealed_secrets import SealedSecret, secret_location

SEED = Secret(bytes(range(SEED_LENGTH)))


def keys(state):
    return ticket_keys(state).reveal().splitlines()


def after(periods, state=SEED):
    for _ in range(periods):
        state = rotate_ticket_state(state)
    return state


@pytest.mark.parametrize("periods", [0, 1, 5])
def test_three_keys_in_haproxys_format(periods):
    found = [base64.b64decode(line, validate=True) for line in keys(after(periods))]
    assert [len(key) for key in found] == [80, 80, 80]
    assert len(set(found)) == 3


@pytest.mark.parametrize("periods", [0, 1, 2, 7])
def test_each_period_moves_the_keys_on_by_one(periods):
    state = after(periods)
    following = rotate_ticket_state(state)
    _before, seals, follows = keys(state)
    assert keys(following)[:2] == [seals, follows], "a former session can be resumed for one more period"
    assert keys(following)[2] not in keys(state)


def test_a_stored_state_has_no_earlier_seed():
    """The state has neither a former seed nor data to derive it from: HKDF cannot be reversed."""
    states = [SEED]
    for _ in range(5):
        states.append(rotate_ticket_state(states[-1]))
    seeds = [tls_tickets._seeds(state) for state in states]
    for period, kept in enumerate(states):
        assert len(kept.reveal()) == SEED_LENGTH * (3 if period else 1), "no seed beyond those in use is kept"
        for before in seeds[:period]:
            assert before[0] not in kept.reveal()
    # Without random bytes, a state yields only later keys.
    derived = {tls_tickets._derive(seed, tls_tickets._NEXT, SEED_LENGTH) for seed in seeds[-1]}
    assert not derived & {seed for found in seeds[:-1] for seed in found}


def test_a_stolen_state_reveals_no_later_key():
    one, other = rotate_ticket_state(SEED), rotate_ticket_state(SEED)
    assert keys(one)[:2] == keys(other)[:2]
    assert keys(one)[2] != keys(other)[2]
    assert not set(keys(after(3))) & set(keys(after(3)))


def test_keys_are_equal_for_equal_input_only():
    assert keys(SEED) == keys(SEED)
    state = after(3)
    assert keys(state) == keys(Secret(state.reveal()))
    assert not set(keys(create_ticket_state())) & set(keys(create_ticket_state()))


@pytest.mark.parametrize("length", [0, 31, 33, 64, 95, 97, 128])
def test_an_invalid_state_is_refused(length):
    for use in (ticket_keys, rotate_ticket_state):
        with pytest.raises(StoreError, match=f"the stored state has {length} bytes"):
            use(Secret(b"x" * length))


def test_the_representation_hides_seed_and_keys():
    found = ticket_keys(SEED)
    assert keys(SEED)[0].decode() not in repr(found) + str(found)
    assert SEED.reveal() not in found.reveal()


def test_the_ticket_file_of_a_load_balancer_contains_the_keys():
    vault, state = Vault([Fernet.generate_key()]), after(6)
    file = File(name="tls/lb/ticket.keys", secret=tickets_of("lb"))
    sealed = {tickets_of("lb"): SealedSecret(content=vault.seal(state, secret_location(tickets_of("lb"))))}
    for _ in range(2):
        (found,), lost = secret_files.fill_files((file,), sealed, vault)
        assert found.content.reveal().splitlines() == keys(state)
        assert lost == {}
