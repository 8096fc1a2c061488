# SPDX-License-Identifier: Apache-2.0
"""Untrusted text in a terminal: control characters are escaped."""

import getpass
import io
import json

import pytest
import sqlalchemy as sa

from amphora_driver.cli import command, drift, formatting
from amphora_driver.cli.failover import SilentAmphorae, Timeline
from amphora_driver.cli.formatting import escape_unprintable, escaping_stream
from amphora_driver.database.engine import Database
from amphora_driver.database.tables import amphora, job
from amphora_driver.database.tables_fleet import failover
from amphora_driver.errors import AgentUnreachable

# Window title, colour, C1 control introducer, text direction override, bell.
HOSTILE = "\x1b]0;gone\x07\x1b[31m\x9b2J\u202e\r\x00"
SHOWN = "\\u001b]0;gone\\u0007\\u001b[31m\\u009b2J\\u202e\\u000d\\u0000"
LB, AMPHORA = "52cf0000-0000-4000-8000-000000000001", "0b9d1c52-7f0e-4a55-9f0c-2f6f3a1f9c11"


@pytest.mark.parametrize(
    ("text", "keep", "expected"),
    [
        ("shop ünter 店 ✓", "", "shop ünter 店 ✓"),
        (HOSTILE, "", SHOWN),
        ("a\nb\tc", "", "a\\u000ab\\u0009c"),
        ("a\nb\tc", "\n", "a\nb\\u0009c"),
        ("\x7f", "", "\\u007f"),
        ("\udcff\U000e0001", "", "\\udcff\\U000e0001"),
    ],
)
def test_unprintable_characters_are_escaped(text, keep, expected):
    assert escape_unprintable(text, keep) == expected


def test_a_stream_escapes_lines_and_columns_and_not_documents():
    under = io.StringIO()
    stream = escaping_stream(under)
    stream.writelines([f"one\t{HOSTILE}\n", "two\n"])
    assert under.getvalue() == f"one\t{SHOWN}\ntwo\n"
    assert not stream.isatty()
    under.truncate(0)
    under.seek(0)
    json.dump({"a": HOSTILE + "\x7f"}, stream)
    assert json.loads(under.getvalue()) == {"a": HOSTILE + "\x7f"}


MACHINE = {
    **dict.fromkeys(("heard", "seen_at", "silent", "verdict", "agent_version", "image", "has_vips", "drifts")),
    "id": "a",
    "role": "single",
    "state": "ready",
    "confirmed": 1,
    "drift": HOSTILE,
    "reason": HOSTILE + "\n",
}
REQUEST = {"generation": 1, "action": "x", "object_id": "o", "accepted_at": 1.0, "applied_at": None, "outcome": HOSTILE}
REASON = {"kind": "pool", "id": "a", "provisioning": "ERROR", "operating": "ERROR", "since": None, "reason": HOSTILE}
FAILOVER = {"id": 1, "cause": "silent", "begun_at": 1.0, "served_at": None, "amphora_id": None, "reason": HOSTILE}


class Row:
    """A row with the columns of an event and of a silent amphora."""

    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.mark.parametrize(
    "column",
    [
        formatting.Value(HOSTILE),
        formatting.ValueList([HOSTILE]),
        formatting.Partners([{"id": HOSTILE, "address": "x"}]),
        formatting.Ports([{"port": {"mac": HOSTILE}}]),
        formatting.Profile({"a": HOSTILE}),
        formatting.Amphorae([MACHINE]),
        formatting.StatusReasons([REASON]),
        formatting.Requests([REQUEST]),
        formatting.Failovers([FAILOVER]),
        Timeline([Row(at=1.0, word="begun", amphora_id=None, detail=HOSTILE)]),
        SilentAmphorae([Row(amphora_id="a", load_balancer_id="b", kind="mute", since=1.0, verdict=HOSTILE)]),
    ],
)
def test_table_columns_are_escaped(column):
    shown = column.human_readable()
    assert shown.isprintable()
    assert "\\u001b]0;gone" in shown
    assert repr(HOSTILE)[1:-1] in repr(column.machine_readable())


def test_a_diff_is_escaped():
    wanted = {"generation": 1, "haproxy": "frontend a\n", "interfaces": [], "vrrp": None}
    said = {"generation": HOSTILE, "haproxy": f"\tfrontend {HOSTILE}b\n", "interfaces": []}
    said["drift"] = {"unrepaired": ["files"], "last": {"sentences": [f"{HOSTILE}\n+ all is well"]}}
    lines = drift.list_differences("a", wanted, said)
    assert [line for line in lines if not line.replace("\t", "").isprintable()] == []
    assert f"the agent cannot repair: {SHOWN}\\u000a+ all is well" in lines


def test_every_output_format_escapes_recorded_text(filled, amphoractl):
    database = Database(f"sqlite:///{filled.parent}/db.sqlite")

    def spoil(connection):
        connection.execute(job.update().values(error=HOSTILE))
        connection.execute(amphora.update().values(drift=HOSTILE, drifts=True))
        row = {"load_balancer_id": LB, "amphora_id": AMPHORA, "cause": "silent", "begun_at": 1.0, "reason": HOSTILE}
        connection.execute(failover.insert().values(id=1, **row))

    database.write(spoil)
    database.dispose()
    for words in (
        *(("status", "check"), ("loadbalancer", "show", LB), ("loadbalancer", "list", "--long"), ("job", "list")),
        *(("amphora", "list"), ("amphora", "show", AMPHORA), ("failover", "show", "1")),
    ):
        for form in ([], ["-f", "value"], ["-f", "csv"], ["-f", "yaml"]):
            if form[1:] == ["csv"] and "show" in words:
                continue
            _, out, err = amphoractl(filled, *words, *form)
            text = (out + err).replace("\n", "")
            assert text.isprintable(), (words, form)
    _, out, _ = amphoractl(filled, "amphora", "show", AMPHORA, "-f", "json")
    shown = json.loads(out)
    assert (shown["Drift"], shown["Drifts"]) == (HOSTILE, True)
    status, _, err = amphoractl(filled, "loadbalancer", "show", HOSTILE.replace("\x00", ""))
    assert status == 1
    assert err.replace("\n", "").isprintable()


class Agents:
    """One agent that does not answer, and one with another configuration."""

    def __init__(self, first):
        self.silent = [first, not first]

    def configuration(self, amphora_id, _address, *, deadline):
        assert deadline is not None
        if self.silent.pop(0):
            raise AgentUnreachable(f"ask amphora {amphora_id}", f"it says {HOSTILE}")
        return {"generation": 7, "haproxy": HOSTILE, "interfaces": []}

    def close(self):
        """Part of the client's interface."""


@pytest.mark.parametrize("first", [True, False])
def test_a_missing_answer_has_precedence_over_a_difference(filled, amphoractl, monkeypatch, first):
    machines = (Row(id="a", management_address="192.0.2.1"), Row(id="b", management_address="192.0.2.2"))
    wanted = json.dumps({"generation": 8, "haproxy": "", "interfaces": [], "vrrp": None})
    monkeypatch.setattr(drift, "load_record", lambda *_: Row(amphorae=machines))
    monkeypatch.setattr(drift, "build_bundles", lambda *_: {"a": wanted, "b": wanted})
    monkeypatch.setattr(drift, "_vault", lambda _: None)
    monkeypatch.setattr(drift, "_agents", lambda *_: Agents(first))
    status, out, err = amphoractl(filled, "loadbalancer", "diff", LB)
    assert status == 2
    assert "generation: wanted 8" in out
    assert SHOWN in err
    assert (out + err).replace("\n", "").isprintable()


def unknown_user():
    raise KeyError("getpwuid(): uid not found: 4711")


def test_a_user_without_a_name_is_recorded_by_number(filled, amphoractl, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", unknown_user)
    with filled.open("a") as file:
        file.write(f"[amp_queue]\nsocket_dir = {filled.parent}/bells\n")
    for words in (
        *(("controller", "drain", "--host", "here"), ("loadbalancer", "resync", LB), ("rotate", "--all")),
        *(("amphora", "failover", AMPHORA), ("circuit-breaker", "open"), ("circuit-breaker", "close")),
    ):
        status, _, err = amphoractl(filled, *words)
        assert status == 0, (words, err)
    database = Database(f"sqlite:///{filled.parent}/db.sqlite")
    asked = database.read(
        lambda c: [
            c.execute(sa.text(f"SELECT asked_by FROM {table}")).scalar_one()
            for table in ("drained_host", "resync", "rotation", "failover")
        ]
    )
    database.dispose()
    assert all(one.startswith("unknown") for one in asked), asked


def test_a_long_user_name_fits_the_column(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "x" * 500)
    assert (len(command.operator_name()), len(command.operator_at_host())) == (128, 128)
