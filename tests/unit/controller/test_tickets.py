# SPDX-License-Identifier: Apache-2.0
"""TLS ticket keys: derived, never stored; three at a time, of which two stay when a period ends."""

import base64

import pytest
from cryptography.fernet import Fernet

from amphora_driver.controller import contents
from amphora_driver.controller.tickets import SEED_LENGTH, ticket_keys
from amphora_driver.model.secrets import tickets
from amphora_driver.render.tls import File
from amphora_driver.secret import Secret
from amphora_driver.store.secrets import Sealed
from amphora_driver.store.vault import Vault

SEED = Secret(bytes(range(SEED_LENGTH)))


def keys(number, seed=SEED):
    return ticket_keys(seed, number).reveal().splitlines()


def test_three_keys_as_haproxy_reads_them():
    found = [base64.b64decode(line, validate=True) for line in keys(1)]
    assert [len(key) for key in found] == [80, 80, 80]
    assert len(set(found)) == 3


@pytest.mark.parametrize("number", [1, 2, 700])
def test_with_every_period_they_move_on_by_one(number):
    _before, seals, follows = keys(number)
    assert keys(number + 1)[:2] == [seals, follows], "what was sealed is opened for one more period"
    assert keys(number + 1)[2] not in keys(number)


def test_the_same_for_the_same_and_others_for_others():
    assert keys(3) == keys(3)
    assert not set(keys(3)) & set(keys(3, Secret(bytes(SEED_LENGTH))))


def test_neither_the_seed_nor_a_key_shows():
    found = ticket_keys(SEED, 1)
    assert keys(1)[0].decode() not in repr(found) + str(found)
    assert SEED.reveal() not in found.reveal()


def test_the_file_of_a_load_balancer_has_them():
    vault = Vault([Fernet.generate_key()])
    file = File(name="tls/lb/ticket.keys", secret=tickets("lb"))
    sealed = {tickets("lb"): Sealed(content=vault.seal(SEED))}
    (found,), lost = contents.filled((file,), sealed, vault, tickets=7)
    assert found.content.reveal().splitlines() == keys(7)
    assert lost == {}
