# SPDX-License-Identifier: Apache-2.0
"""The systemd units of daemons. tests/dataplane/test_systemd.py runs them under systemd."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import amphora_agent
from amphora_agent.errors import ServiceError
from amphora_agent.services.systemd import exit_code
from amphora_agent.services.systemd_units import Unit, UnitChange, compare_units, quoted, render_unit, unit_name

SCRIPT = Path(amphora_agent.__file__).parent / "templates/daemon.sh"


def unit(**changes) -> Unit:
    usual = {
        "name": "haproxy",
        "argv": ("/usr/sbin/haproxy", "-W"),
        "namespace": Path("/run/netns/inner"),
        "script": Path("/lib/daemon.sh"),
        "state": Path("/run/state"),
        "run": Path("/run/amphora-agent"),
        "health": Path("/run/health"),
    }
    return Unit(**{**usual, **changes})


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("", '""'),
        ("plain", '"plain"'),
        ("two words", '"two words"'),
        (";", '";"'),
        ('say "x"', '"say \\"x\\""'),
        ("it's", '"it\'s"'),
        ("\\n", '"\\\\n"'),
        ("a\nb\tc\rd", '"a\\nb\\tc\\rd"'),
        ("\x01\x7f", '"\\x01\\x7f"'),
        ("%n 100%", '"%%n 100%%"'),
        ("$HOME ${X} $$", '"$HOME ${X} $$"'),  # the line has the prefix ':'
        ("é", '"é"'),
        ("-@:+!", '"-@:+!"'),
    ],
)
def test_a_word_is_quoted(word, written):
    assert quoted(word) == written


@pytest.mark.parametrize("word", ["a\0b", "\udcff"])
def test_unsafe_words_are_refused(word):
    with pytest.raises(ServiceError, match="contains a NUL character or half"):
        quoted(word)


@pytest.mark.parametrize(
    ("service", "name"),
    [("haproxy", "amphora-haproxy.service"), ("amphora-responder", "amphora-responder.service")],
)
def test_names_are_accepted(service, name):
    assert unit_name(service) == name


@pytest.mark.parametrize("service", ["", "../x", "a b", "x@y", "Å", "-x", "a.service"])
def test_unsafe_names_are_refused(service):
    with pytest.raises(ServiceError, match="not a valid name"):
        unit_name(service)


def test_a_unit_is_rendered():
    lines = render_unit(unit(delay=5.5, leftovers=(Path("/run/a b"),))).splitlines()
    assert 'ExecStart=:"/usr/sbin/haproxy" "-W"' in lines
    assert 'ExecCondition=+:"/bin/sh" "/lib/daemon.sh" "later" "/run/state" "/run/a b"' in lines
    assert 'ExecStopPost=-+:"/bin/sh" "/lib/daemon.sh" "end" "/run/state" "/run/health"' in lines
    assert "NetworkNamespacePath=/run/netns/inner" in lines
    assert "RestartSec=5500ms" in lines
    assert "amphora-agent.service" not in "".join(lines)  # no dependency


def test_a_unit_outside_the_namespace_has_no_namespace_path():
    text = render_unit(unit(namespace=None, health=None))
    assert "NetworkNamespacePath" not in text
    assert '"end" "/run/state" ""' in text
    assert '"begin"' in text


def test_line_breaks_add_no_lines_to_a_unit():
    hostile = unit(argv=("/bin/x", "a\nExecStart=/bin/evil", "b\\\nRestart=no"))
    assert len(render_unit(hostile).splitlines()) == len(render_unit(unit()).splitlines())
    with pytest.raises(ServiceError, match="contains characters that systemd does not permit"):
        render_unit(unit(namespace=Path("/run/x\nUser=nobody")))


@pytest.mark.parametrize(
    ("changes", "change"),
    [
        ({}, UnitChange.NONE),
        ({"delay": 7.0}, UnitChange.POLICY),
        ({"leftovers": (Path("/x"),)}, UnitChange.POLICY),
        ({"argv": ("/usr/sbin/haproxy", "-Ws")}, UnitChange.COMMAND),
        ({"namespace": None}, UnitChange.COMMAND),
    ],
)
def test_changed_units_are_reported(changes, change):
    assert compare_units(render_unit(unit()), render_unit(unit(**changes))) is change
    assert compare_units(None, render_unit(unit())) is UnitChange.NEW


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (None, None),
        (" ", None),
        ("exited 0", 0),
        ("exited 203", 203),
        ("killed KILL", -9),
        ("dumped SEGV", -11),
        ("killed NONSENSE", None),
        ("exited ", None),
    ],
)
def test_the_reason_of_an_end_is_parsed(said, code):
    assert exit_code(said) == code


# -- wrapper script of a daemon ----------------------------------------------------------------------------------------


def script(verb, state, *words, **environment) -> int:
    done = subprocess.run(
        ["sh", str(SCRIPT), verb, str(state), *map(str, words)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode


@pytest.mark.parametrize(
    ("wanted", "code"), [("wanted", 0), ("dismissed", 1), ("stopped", 1), ("missed", 1), (None, 1)]
)
def test_only_a_wanted_daemon_starts(tmp_path, wanted, code):
    if wanted is not None:
        (tmp_path / "wanted").write_text(f"{wanted}\n")
    (tmp_path / "a leftover").write_text("")
    assert script("begin", tmp_path, tmp_path / "a leftover", tmp_path / "none") == code
    assert (tmp_path / "a leftover").exists() is bool(code)
    assert (tmp_path / "starts").exists() is not bool(code)


@pytest.mark.parametrize(("wanted", "health"), [("wanted", "1"), ("missed", "1"), ("dismissed", "0"), ("stopped", "0")])
def test_a_missing_exit_record_is_reported(tmp_path, wanted, health):
    (tmp_path / "wanted").write_text(f"{wanted}\n")
    (tmp_path / "pid").write_text("7\n")
    script("end", tmp_path, tmp_path / "health", SERVICE_RESULT="signal", EXIT_CODE="killed", EXIT_STATUS="SEGV")
    assert (tmp_path / "health").read_text() == health
    assert (tmp_path / "exit").read_text() == "killed SEGV\n"
    assert not (tmp_path / "pid").exists()


def test_a_unit_that_never_started_has_not_failed(tmp_path):
    (tmp_path / "wanted").write_text("stopped\n")
    script("end", tmp_path, tmp_path / "health", SERVICE_RESULT="exec-condition")
    assert [file.name for file in tmp_path.iterdir()] == ["wanted"]


def test_start_and_end_of_a_daemon_are_recorded(tmp_path):
    (tmp_path / "wanted").write_text("wanted\n")
    for number in (1, 2, 3):
        assert script("begin", tmp_path) == 0
        assert script("up", tmp_path, MAINPID="123") == 0
        assert (tmp_path / "pid").read_text() == "123\n"
        assert (tmp_path / "starts").read_text() == f"{number}\n"
        script("end", tmp_path, "", SERVICE_RESULT="exit-code", EXIT_CODE="exited", EXIT_STATUS="1")
        assert (tmp_path / "deaths").read_text() == f"{number}\n"
    (tmp_path / "begun").write_text("0\n")  # the daemon has run since the boot
    script("end", tmp_path, "", SERVICE_RESULT="exit-code", EXIT_CODE="exited", EXIT_STATUS="1")
    assert (tmp_path / "deaths").read_text() == "0\n"
