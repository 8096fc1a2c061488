# SPDX-License-Identifier: Apache-2.0
"""Keystone and Neutron on a copy of prepared databases. As a program: prepare them.

The creation of tables and users takes most of the start of a cloud. The first run keeps the databases in
.sandbox/openstack-databases, and each cloud starts on a copy.

Invariant: the name of a folder is a digest of all that its content depends on, and a folder with this name is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import mariadb
import sqlalchemy as sa
from cloud_lab import HERE, VENV, Cloud
from free_ports import free_ports

_FOLDER = HERE.parents[1] / ".sandbox/openstack-databases"
_NAMES = tuple(Cloud.threads)
# The keys of the tokens and of the credentials.
_KEYS = ("fernet", "credential")


@contextmanager
def cloud():
    """Run a cloud inside the block."""
    prepared = prepare()
    facts = json.loads((prepared / "facts.json").read_text())
    folder = Path(tempfile.mkdtemp(prefix="adc-"))
    try:
        with mariadb.copied(prepared / "data", *_NAMES) as urls:
            made = Cloud(folder, _named(urls), _named(free_ports(2)), facts["password"], facts["projects"])
            for name in _KEYS:
                shutil.copytree(prepared / name, folder / name)
            _replace_in_catalogue(made, lambda name: (_placeholder(name), _address(made, name)))
            try:
                made.start()
                yield made
            finally:
                made.stop()
    finally:
        shutil.rmtree(folder)


def prepare():
    """Return the folder of the prepared databases; the first process makes it."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    place = _FOLDER / f"{VENV.name}-{_digest()}"
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            for former in (*_FOLDER.glob(f"{VENV.name}-*"), *_FOLDER.glob("new-*")):
                shutil.rmtree(former)
            new = Path(tempfile.mkdtemp(prefix="new-", dir=_FOLDER))
            _make(new)
            new.rename(place)
    return place


def _make(place):
    folder = Path(tempfile.mkdtemp(prefix="adc-"))
    try:
        with mariadb.killable(*_NAMES) as server:
            made = Cloud(folder, _named(server.urls), _named(free_ports(2)))
            try:
                made.prepare()
                _replace_in_catalogue(made, lambda name: (_address(made, name), _placeholder(name)))
            finally:
                made.stop()
            server.stop()
            shutil.move(server.data, place / "data")
        for name in _KEYS:
            shutil.move(folder / name, place / name)
        facts = {"password": made.password, "projects": made.projects}
        (place / "facts.json").write_text(json.dumps(facts))
    finally:
        shutil.rmtree(folder)


def _digest():
    """Return a digest of the services, of MariaDB, and of the programs that prepare the databases."""
    installed = sorted(one.name for one in VENV.glob("lib/python*/site-packages/*.dist-info"))
    files = [HERE / name for name in ("prepare_keystone.py", "prepare_neutron.py", "cloud_lab.py")]
    programs = [one.read_text() for one in (*files, Path(__file__), Path(mariadb.__file__))]
    text = json.dumps([installed, mariadb.version(), programs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _replace_in_catalogue(made, words):
    """Replace a part of each URL in Keystone's catalogue; `words` returns old and new text by service."""
    engine = sa.create_engine(made.databases["keystone"])
    with engine.begin() as connection:
        for name in _NAMES:
            old, new = words(name)
            connection.execute(sa.text("UPDATE endpoint SET url = REPLACE(url, :old, :new)"), {"old": old, "new": new})
    engine.dispose()


def _address(made, name):
    return f"//127.0.0.1:{made.ports[name]}"


def _placeholder(name):
    return f"//{name}"


def _named(values):
    return dict(zip(_NAMES, values, strict=True))


if __name__ == "__main__":
    prepare()
