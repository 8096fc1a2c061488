# SPDX-License-Identifier: Apache-2.0
"""Records for the read-only mode: no secrets, only authorised readers, and readers of another version fail."""

import http.client
import json

import msgspec
import pytest
import sqlalchemy as sa
from fleet_rows import identifier, rows, write

from amphora_driver import config
from amphora_driver.database import tables, tables_fleet
from amphora_driver.database.rows import plain_columns
from amphora_driver.errors import SchemaMismatch, StoreError
from amphora_driver.secret import Secret
from amphora_driver.store.process_registry import ProcessKind
from amphora_driver.telemetry import records
from amphora_driver.telemetry.handlers import parse_scope
from amphora_driver.telemetry.http_request import Request, RequestRefused
from amphora_driver.telemetry.http_server import Telemetry
from amphora_driver.telemetry.records import RecordReader, Scope, TableRows, read_records, sent_columns
from amphora_driver.telemetry.records_client import StatusPageRecords

SCOPES = (Scope(), Scope(load_balancer=identifier(1)), Scope(failover=1))
CANARY = b"canary"


def read(database, scope):
    return read_records(database, scope, "1", {})


def test_no_scope_has_encrypted_content(database):
    found = rows(2)
    for one in found["amphora"]:
        one["heartbeat_key"] = CANARY
    of = identifier(1)
    found["secret"] = [{"object_id": of, "purpose": "tls", "ref": "r", "load_balancer_id": of, "sealed": CANARY}]
    found["secret"][0]["expires_at"] = 5.0
    found["certificate_authority"] = [
        {"kind": "amphora", "state": "current", "certificate": "x", "sealed_key": CANARY, "created_at": 1.0}
        | {"changed_at": 1.0, "expires_at": 2.0}
    ]
    listener = {"id": "listener", "kind": "listeners", "load_balancer_id": of, "created": 9, "generation": 5}
    found["desired_object"].append({**listener, "removed": False, "body": '{"name": "canary"}'})
    write(database, found)
    write(database, {"failover": [{"load_balancer_id": of, "cause": "silent", "begun_at": 1.0}]})
    for scope in SCOPES:
        document = read(database, scope)
        assert CANARY not in msgspec.json.encode(document)
        if "secret" in document.tables:
            assert document.tables["secret"].columns == ("object_id", "load_balancer_id", "expires_at")
    # The load balancer itself has its attributes, because the commands show them.
    assert b"shop-1" in msgspec.json.encode(read(database, SCOPES[1]))


def test_no_column_of_a_document_is_binary():
    every = [one for table in tables_fleet.metadata.tables.values() for one in sent_columns(table)]
    assert len(every) > 100
    assert not [one for one in every if isinstance(one.type, sa.LargeBinary)]
    hidden = {tables.amphora.c.heartbeat_key, tables.secret.c.sealed, tables_fleet.certificate_authority.c.sealed_key}
    assert not hidden & set(every)


def test_a_limit_is_reported(database, monkeypatch):
    write(database, rows(3))
    assert not read(database, Scope()).cut
    monkeypatch.setattr(records, "MAX_ROWS", 3)
    found = read(database, Scope())
    assert found.cut
    assert len(found.tables["job"].rows) == 3


def test_a_document_is_read_once_in_a_second(database):
    write(database, rows(1))
    now = [0.0]
    reader = RecordReader(database, "1", {}, lambda: now[0])
    first = reader.encode(Scope())
    write(database, {"resync": [{"load_balancer_id": "x", "asked_at": 1.0, "remove_unknown": False}]})
    now[0] = 0.9
    assert reader.encode(Scope()) == first
    assert reader.encode(Scope(load_balancer="0")) != first
    now[0] = 1.1
    assert len(json.loads(reader.encode(Scope()))["tables"]["resync"]["rows"]) == 1


def request(query):
    return Request(method="GET", path="/records.json", query=query, headers={})


@pytest.mark.parametrize(
    ("query", "scope"),
    [
        ("", Scope()),
        ("load_balancer=52cf", Scope(load_balancer="52cf")),
        ("failover=12", Scope(failover=12)),
        ("failover=-1", None),
        ("failover=" + "9" * 19, None),
        ("failover=%C2%B2", None),
        ("load_balancer=" + "a" * 37, None),
        ("load_balancer=a&failover=1", None),
    ],
)
def test_scopes_of_requests(query, scope):
    if scope is not None:
        assert parse_scope(request(query)) == scope
        return
    with pytest.raises(RequestRefused) as caught:
        parse_scope(request(query))
    assert caught.value.status == 400


def test_without_a_token_the_page_has_no_records(url, database):
    write(database, rows(1))
    conf = config.load([])
    conf.set_override("connection", url, "amp_database")
    conf.set_override("bind_port", 1, "amp_status_page")
    telemetry = Telemetry(conf, ProcessKind.CONTROLLER, "ctl:1", lambda: True)
    telemetry.server.port = 0
    with telemetry:
        assert telemetry.server.wait_until_listening(60)
        for path, status in (("/status.json", 200), ("/records.json", 403)):
            connection = http.client.HTTPConnection("127.0.0.1", telemetry.server.port, timeout=60)
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == status
            assert status == 200 or b"token_file is not set" in answer.read()
            connection.close()


def client(document, monkeypatch):
    found = StatusPageRecords("http://127.0.0.1:1", Secret(b"t"))
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    monkeypatch.setattr(found, "_fetch", lambda _scope: found._decode(body))
    return found


def all_jobs(connection):
    return connection.execute(sa.select(*plain_columns(tables.job, "reread"))).all()


def test_a_reader_gets_the_rows(database, monkeypatch):
    write(database, rows(2))
    document = read(database, Scope())
    (first, second) = client(document, monkeypatch).read(all_jobs, Scope())
    assert (first.load_balancer_id, first.dirty, second.generation) == (identifier(1), False, 5)


def test_missing_tables_and_columns_are_errors(database, monkeypatch):
    write(database, rows(1))
    document = read(database, Scope())
    job = document.tables["job"]
    columns = tuple(name for name in job.columns if name != "attempts")
    place = job.columns.index("attempts")
    shorter = TableRows(columns, [(*row[:place], *row[place + 1 :]) for row in job.rows])
    unknown = TableRows(("a",), [(1,)])
    for changed in ({}, {**document.tables, "job": shorter, "invented": unknown}):
        found = client(msgspec.structs.replace(document, tables=changed), monkeypatch)
        with pytest.raises(SchemaMismatch, match=r"do not have the data of this command.*version 1"):
            found.read(all_jobs, Scope())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, "another format of records"),
        ({"tables": {"job": TableRows(("load_balancer_id", "op"), [("a",)])}}, "a row of the answer is incomplete"),
    ],
)
def test_other_documents_are_refused(database, monkeypatch, change, error):
    found = client(msgspec.structs.replace(read(database, Scope()), **change), monkeypatch)
    with pytest.raises(StoreError, match=error):
        found.read(all_jobs, Scope())


def test_an_answer_that_is_no_document_is_refused(monkeypatch):
    with pytest.raises(StoreError, match="the answer has no records"):
        client(b"<html>", monkeypatch).read(all_jobs, Scope())


def test_an_option_that_the_process_does_not_send_is_unknown(monkeypatch, database):
    options = {"amp_spares": {"number": 3}, "amp_database": {"connection": "sqlite:///elsewhere"}}
    document = read_records(database, Scope(), "1", options)
    conf = client(document, monkeypatch).options()
    assert conf.amp_spares.number == 3
    with pytest.raises(AttributeError):
        conf.amp_database  # noqa: B018 - the access is the test
    complete = records.read_options(config.load([]))
    assert sum(map(len, complete.values())) == len(records.OPTIONS)
    assert client(msgspec.structs.replace(document, options=complete), monkeypatch).options().amp_failover.automatic
