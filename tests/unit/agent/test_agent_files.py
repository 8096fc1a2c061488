# SPDX-License-Identifier: Apache-2.0
"""Sets of files, the document that lists them, and HAProxy's messages about them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from amphora_agent.apply.file_sets import FileSets
from amphora_agent.bundle import File
from amphora_agent.errors import ConfigurationRefused, MachineError
from amphora_agent.haproxy import config_file, worker_replacement
from amphora_agent.haproxy.config_check import translate_error
from amphora_agent.haproxy.config_parser import parse
from amphora_agent.paths import Paths

LISTENER, POOL, RULE, MEMBER = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "1234")
PEM, CA = f"tls/{LISTENER}/default.pem", f"tls/{POOL}/ca.pem"


def file(name: str, content: str) -> File:
    return File(name, hashlib.sha256(content.encode()).hexdigest(), content)


@pytest.fixture
def sets(tmp_path):
    paths = Paths(tmp_path)
    paths.run.mkdir(parents=True)
    return FileSets(paths)


def names(place: Path) -> set[str]:
    return {str(f.relative_to(place)) for f in place.rglob("*") if f.is_file()}


def test_a_file_set_is_complete_private_and_reused(sets, tmp_path):
    files = (file(PEM, "a"), file(CA, "b"))
    place = sets.create(files)
    assert names(place) == {PEM, CA}
    assert (place / PEM).read_text() == "a"
    root = Paths(tmp_path).files
    assert {p.stat().st_mode & 0o777 for p in (root, *root.rglob("*")) if p.is_dir()} == {0o700}
    assert {p.stat().st_mode & 0o777 for p in root.rglob("*") if p.is_file()} == {0o600}
    bare = tuple(File(f.name, f.sha256) for f in files)
    again = FileSets(Paths(tmp_path))
    assert again.holds(bare)
    assert again.create(bare) == place
    (place / CA).write_text("c")
    assert not FileSets(Paths(tmp_path)).holds(bare)
    (place / CA).unlink()
    assert not FileSets(Paths(tmp_path)).holds(bare)
    # The agent writes a damaged set again if it has the contents.
    assert FileSets(Paths(tmp_path)).create(files) == place
    assert (place / CA).read_text() == "b"


def test_missing_contents_leave_no_file_set(sets, tmp_path):
    with pytest.raises(MachineError, match="its content is lost"):
        sets.create((file(PEM, "a"), File(CA, "0" * 64)))
    assert list(Paths(tmp_path).files.iterdir()) == []


def test_no_files_need_no_directory(sets, tmp_path):
    assert sets.holds(())
    assert sets.create(()) == Paths(tmp_path).empty
    assert not Paths(tmp_path).files.exists()
    sets.keep_only(())


def test_only_changed_files_are_written_and_unused_ones_removed(sets):
    old, new = (file(PEM, "a"), file(CA, "b")), (file(PEM, "c"), file(CA, "b"))
    before = sets.create(old)
    after = sets.create(new, old)
    assert before != after
    assert (before / CA).samefile(after / CA)
    assert ((before / PEM).read_text(), (after / PEM).read_text()) == ("a", "c")
    half_made = before.with_name(".half")
    half_made.mkdir()
    sets.keep_only({after})
    assert not before.exists()
    assert not half_made.exists()
    assert (after / CA).read_text() == "b"
    assert sets.create(old, new) == before
    assert (before / PEM).read_text() == "a"


def composed(text: str, certificates=()):
    return config_file.compose(text, files=Path("/run/x/files/0a"), maxconn=7, threads=1, certificates=certificates)


def test_a_document_is_split_into_its_files():
    made = composed("defaults\n    mode http\n", [PEM])
    assert config_file.read(made.content) == made
    assert made.files == Path("/run/x/files/0a")
    assert made.line(made.content.split("\n").index("defaults") + 1) == 1
    assert config_file.read("defaults\n") == config_file.Document("", "defaults\n")
    assert f"    bind 127.0.0.1:9103 ssl crt {PEM}\n" in made.head
    assert "frontend" not in composed("").head


TEXT = f"""frontend {LISTENER}
    bind 198.51.100.5:443 ssl crt {PEM}
    acl {RULE} path_reg x
    acl other path_reg x
    http-request deny if {RULE}
backend {POOL}:{LISTENER}
    server {MEMBER} 192.0.2.1:80 ssl ca-file {CA}
"""
KEY = "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg"
FILES = (
    file(PEM, f"-----BEGIN PRIVATE KEY-----\n{KEY}\n-----END PRIVATE KEY-----\n"),
    file(CA, "x"),
)


def refused(message: str, line: int | None = None, name: str = "haproxy.cfg.new"):
    wanted = composed(TEXT)
    where = "" if line is None else f"parsing [/var/lib/x/{name}:{wanted.head.count(chr(10)) + line}] : "
    output = f"[NOTICE]   (1) : haproxy version\n[ALERT]    (1) : config : {where}{message}\n"
    return translate_error(output, wanted, parse(TEXT), FILES, Path("/var/lib/x/haproxy.cfg.new"))


@pytest.mark.parametrize(
    ("line", "message", "object_id", "said"),
    [
        (3, "error detected while parsing ACL", RULE, "line 3: error detected while parsing ACL"),
        (4, "error", LISTENER, "line 4: error"),
        (5, "error", LISTENER, "line 5: error"),
        (2, f"unable to load '/run/x/files/0a/{PEM}'", LISTENER, f"line 2: unable to load '{PEM}'"),
        (7, f"'server {POOL}:{LISTENER}/{MEMBER}' : unable to load {CA}", POOL, None),
        (7, "'ssl' : no", MEMBER, "line 7: 'ssl' : no"),
        (-1, f"'bind' : unable to load '{CA}'", POOL, f"'bind' : unable to load '{CA}'"),
        (None, f"'server {POOL}:{LISTENER}/{MEMBER}' : no", MEMBER, None),
        (None, f"Proxy '{LISTENER}': in 'tls/{LISTENER}/other' {CA}", POOL, None),
        (None, "nothing known", None, "nothing known"),
    ],
)
def test_the_object_at_fault_is_found(line, message, object_id, said):
    error = refused(message, line)
    assert isinstance(error, ConfigurationRefused)
    assert error.object_id == object_id
    assert said is None or error.happened == said


def test_an_error_in_the_amphora_sections_is_internal():
    assert type(refused("unknown keyword", -1)) is MachineError
    assert type(refused("unknown keyword", 3, "machine.cfg")) is MachineError


def test_a_key_in_an_haproxy_message_is_redacted():
    for message in (f"unable to stat SSL certificate from file '{KEY}'", f"{PEM}: unknown keyword '{KEY[:20]}'"):
        error = refused(message, 2)
        assert KEY[:12] not in str(error)
        assert error.object_id == LISTENER


ANSWER = """# table: p:l, type: ipv6, size:10240, used:{used}

0x56148b79bb10: [21/Nov/2026:15:37:44] id=amphora disabled=0 flags={flags} resync_timeout=4s task_calls=1
  0x56148b79bc80: id=local(local,inactive) addr=127.0.0.1:9102 last_status=NONE last_hdshk=<NEVER>
        flags=0x0
"""


@pytest.mark.parametrize(
    ("used", "flags", "lost"),
    [(1, "0x11", True), (20, "0x100c", True), (0, "0x11", False), (1, "0x33", False), (1, "0x1103", False)],
)
def test_stick_tables_are_passed_between_workers(used, flags, lost):
    assert worker_replacement.would_lose_entries(ANSWER.format(used=used, flags=flags)) is lost
    assert worker_replacement.would_lose_entries(ANSWER.format(used=0, flags=flags), has_predecessor=True) is (
        flags in ("0x11", "0x100c")
    )
    assert not worker_replacement.would_lose_entries("# table: p:l, type: ipv6, size:10240, used:9\n\n")
