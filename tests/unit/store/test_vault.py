# SPDX-License-Identifier: Apache-2.0
"""The vault reloads its key file, refuses a file that others can read, and shows no key."""

import logging
import os
import threading
import traceback
from types import SimpleNamespace

import pytest
from cryptography.fernet import Fernet

from amphora_driver.database import vault as vault_module
from amphora_driver.database.vault import SecretLocation, Vault
from amphora_driver.errors import ConfigurationError, StoreError
from amphora_driver.secret import Secret

OLD, NEW, OTHER = (Fernet.generate_key() for _ in range(3))
CANARY = Secret(b"a secret of a user")
HERE = SecretLocation("secret", ("listener", "certificate", "ref"))


def find_key(vault, sealed, location):
    (found,) = vault.find_keys([(sealed, location)])
    return found


def write(path, *keys, mode=0o600):
    """Replace the file under the same name, as an editor or configuration management does."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(b"".join(key + b"\n" for key in keys))
    fresh.chmod(mode)
    fresh.replace(path)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "encryption.keys"
    write(found, OLD)
    return found


@pytest.fixture
def clock(monkeypatch):
    """A fake clock for the vault."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(vault_module, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_the_first_key_seals_and_all_keys_open(path):
    before = Vault.load(str(path)).seal(CANARY, HERE)
    write(path, NEW, OLD)
    vault = Vault.load(str(path))
    after = vault.seal(CANARY, HERE)
    assert vault.open(before, HERE) == vault.open(after, HERE) == CANARY
    assert (vault.key_index(before), vault.key_index(after)) == (1, 0)
    assert vault.key_index(Vault([OTHER]).seal(CANARY, HERE)) is None
    assert vault.reseal(after, HERE) == after
    assert Vault([NEW]).open(vault.reseal(before, HERE), HERE) == CANARY
    with pytest.raises(StoreError):
        Vault([NEW]).open(before, HERE)


@pytest.mark.parametrize(
    "there",
    [
        SecretLocation("secret", ("another", "certificate", "ref")),
        SecretLocation("secret", ("listener", "ca", "ref")),
        SecretLocation("secret", ("listener", "certificate", "another")),
        SecretLocation("amphora", ("listener", "certificate", "ref")),
        SecretLocation("secret", ("listenercertificate", "", "ref")),
        SecretLocation("secret", ("listener", "certificate", "ref", "")),
    ],
)
def test_a_value_opens_only_in_its_own_location(there):
    vault = Vault([NEW])
    sealed = vault.seal(CANARY, HERE)
    assert vault.open(sealed, HERE) == CANARY
    assert (find_key(vault, sealed, HERE), find_key(vault, sealed, there)) == ((0, False), (0, True))
    for use in (vault.open, vault.reseal):
        with pytest.raises(
            StoreError, match=r"table .* was encrypted for another row or purpose. The value was copied"
        ) as caught:
            use(sealed, there)
        assert CANARY.reveal().decode() not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("content", [CANARY.reveal(), b"", bytes(range(32))])
def test_a_value_without_a_location_is_refused(content):
    vault = Vault([NEW, OLD])
    for index, key in enumerate((NEW, OLD)):
        unbound = Fernet(key).encrypt(content)
        assert find_key(vault, unbound, HERE) == (index, True)
        for use in (vault.open, vault.reseal):
            with pytest.raises(StoreError, match="was encrypted for another row or purpose"):
                use(unbound, HERE)
    assert find_key(vault, Vault([OTHER]).seal(CANARY, HERE), HERE) == (None, False)


def test_a_running_process_loads_a_changed_key_file(path, caplog, clock):
    caplog.set_level(logging.INFO)
    vault = Vault.load(str(path))
    write(path, OLD, NEW)
    assert vault.open(Vault([NEW]).seal(CANARY, HERE), HERE) == CANARY, "a key added at the end opens"
    assert vault.key_index(vault.seal(CANARY, HERE)) == 0
    assert Vault([OLD]).open(vault.seal(CANARY, HERE), HERE) == CANARY, "a key added at the end does not seal"
    write(path, NEW, OLD)
    assert Vault([NEW]).open(vault.seal(CANARY, HERE), HERE) == CANARY
    write(path, NEW)
    vault.seal(CANARY, HERE)
    clock.now += 61
    with pytest.raises(StoreError):
        vault.open(Vault([OLD]).seal(CANARY, HERE), HERE)
    assert NEW.decode() not in caplog.text
    assert vault.fingerprints[0] in caplog.text


def test_a_key_file_changed_in_place_is_loaded(path):
    vault = Vault.load(str(path))
    path.write_bytes(NEW + b"\n" + OLD)
    assert Vault([NEW]).open(vault.seal(CANARY, HERE), HERE) == CANARY


def test_a_half_written_key_file_loses_no_secret(path, clock):
    """A file that is read during a write looks like a valid file with fewer keys."""
    write(path, NEW, OLD)
    vault = Vault.load(str(path))
    sealed = Vault([OLD]).seal(CANARY, HERE)
    path.write_bytes(NEW + b"\n")
    assert vault.open(sealed, HERE) == CANARY
    assert vault.key_index(sealed) is None, "the key is not in the file"
    elsewhere = SecretLocation("secret", ("another", "certificate", "ref"))
    assert (find_key(vault, sealed, HERE), find_key(vault, sealed, elsewhere)) == ((None, False), (None, True))
    assert Vault([NEW]).open(vault.reseal(sealed, HERE), HERE) == CANARY
    path.write_bytes(NEW + b"\n" + OLD + b"\n")
    clock.now += 3600
    assert vault.open(sealed, HERE) == CANARY
    assert vault.key_index(sealed) == 1


def test_a_removed_key_opens_for_a_minute_and_seals_nothing(path, clock):
    vault = Vault.load(str(path))
    sealed = vault.seal(CANARY, HERE)
    write(path, OTHER)
    vault.seal(CANARY, HERE)
    clock.now += 30
    write(path, NEW)
    assert vault.open(sealed, HERE) == CANARY
    assert Vault([NEW]).open(vault.seal(CANARY, HERE), HERE) == CANARY
    assert len(vault.fingerprints) == 1
    clock.now += 61
    with pytest.raises(StoreError):
        vault.open(sealed, HERE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"half a ke"),
        lambda path: write(path, NEW, mode=0o644),
    ],
)
def test_an_invalid_key_file_leaves_the_keys_in_use(path, caplog, spoil):
    vault = Vault.load(str(path))
    sealed = vault.seal(CANARY, HERE)
    spoil(path)
    for _ in range(3):
        assert vault.open(sealed, HERE) == CANARY
    assert caplog.text.count("keeps the current encryption keys") == 1, "one log line for all secrets"
    write(path, NEW, OLD)
    assert vault.key_index(sealed) == 1, "the next valid file is loaded"


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o777])
def test_world_readable_file_is_refused(path, mode):
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"mode {mode:04o}.*chmod o-rwx {path}"):
        Vault.load(str(path))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_owner_and_group_may_read_the_key_file(path, mode):
    path.chmod(mode)
    assert Vault.load(str(path)).fingerprints


def test_key_errors_do_not_contain_the_key(path):
    spoilt = OLD[:-4]
    write(path, NEW, spoilt)
    with pytest.raises(ConfigurationError, match="line 2") as caught:
        Vault.load(str(path))
    shown = "".join(traceback.format_exception(caught.value))
    assert spoilt.decode() not in shown


def test_a_fingerprint_identifies_a_key_without_revealing_it(path):
    write(path, OLD, NEW)
    first, second = Vault.load(str(path)).fingerprints
    assert first != second
    assert Vault([OLD]).fingerprints == (first,)
    assert first.encode() not in OLD


def test_threads_use_old_or_new_keys(path):
    """Repeated key rotation under load: a process with both keys opens every value."""
    write(path, OLD, NEW)
    vault = Vault.load(str(path))
    wrong = []
    end = threading.Event()

    def work():
        while not end.is_set():
            try:
                assert vault.open(vault.seal(CANARY, HERE), HERE) == CANARY
            except Exception as error:  # noqa: BLE001 - any error fails the test
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(50):
        write(path, *((OLD, NEW) if number % 2 else (NEW, OLD)))
        vault.seal(CANARY, HERE)
    end.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_loads_a_changed_key_file(path):
    vault = Vault.load(str(path))
    vault.seal(CANARY, HERE)
    write(path, NEW, OLD)
    child = os.fork()
    if child == 0:
        os._exit(0 if Vault([NEW]).key_index(vault.seal(CANARY, HERE)) == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
