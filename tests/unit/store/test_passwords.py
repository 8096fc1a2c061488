# SPDX-License-Identifier: Apache-2.0
"""The password in the database URL appears in no error and no log."""

import logging
import traceback

import pytest
from oslo_config import cfg
from oslo_log import log

from amphora_driver import config
from amphora_driver.cli.main import main
from amphora_driver.database import migrate, schema_check
from amphora_driver.database.engine import Database
from amphora_driver.errors import AmphoraDriverError

PASSWORD = "canary%2Fcanary"
WRONG = {
    "no server": f"mysql+pymysql://me:{PASSWORD}@127.0.0.1:1/store",
    "no server of PostgreSQL": f"postgresql+psycopg://me:{PASSWORD}@127.0.0.1:1/store",
    "no such driver": f"nosuch+driver://me:{PASSWORD}@host/store",
    "no URL": f"me:{PASSWORD}@host/store",
    "an @ in it": "mysql+pymysql://me:pass@canary@host/store",
    "an @ and a colon in it": "mysql+pymysql://me:pass@word:canary@host/store",
    "no port": f"mysql+pymysql://me:{PASSWORD}@host:port/store",
}


@pytest.mark.parametrize("url", WRONG.values(), ids=WRONG)
def test_no_error_shows_the_password(url, caplog):
    caplog.set_level(logging.DEBUG)
    database = Database(url)
    for attempt in (database.read, database.write):
        with pytest.raises(AmphoraDriverError) as caught:
            attempt(lambda connection: None)
        shown = "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "canary" not in shown
    database.dispose()
    assert "canary" not in caplog.text


@pytest.mark.parametrize("url", WRONG.values(), ids=WRONG)
def test_no_service_logs_the_password(url, caplog):
    caplog.set_level(logging.DEBUG)
    schema_check.is_usable(Database(url))
    assert caplog.text
    assert "canary" not in caplog.text


@pytest.fixture
def logging_as_it_was():
    """Restore the root logger: cliff adds its own handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("words", [("job", "list"), ("database", "status"), ("database", "upgrade")], ids=" ".join)
@pytest.mark.parametrize("wrong", WRONG)
def test_no_command_shows_the_password(wrong, words, tmp_path, capsys, caplog, logging_as_it_was, monkeypatch):
    monkeypatch.setattr(migrate, "_ATTEMPTS", 1)
    path = tmp_path / "amphora-driver.conf"
    path.write_text(f"[amp_database]\nconnection = {WRONG[wrong]}\n")
    said = ""
    for how in ((), ("--debug",)):
        assert main([*how, "--config-file", str(path), *words]) != 0
        said += "".join(capsys.readouterr()) + caplog.text
    assert "database" in said
    assert "canary" not in said


def test_options_with_passwords_are_masked(tmp_path, caplog):
    path = tmp_path / "amphora-driver.conf"
    path.write_text(
        f"[amp_database]\nconnection = {WRONG['no server']}\n[amp_queue]\nbroker_url = amqp://me:{PASSWORD}@host:5672//\n"
    )
    conf = config.load([str(path)])
    caplog.set_level(logging.DEBUG)
    conf.log_opt_values(log.getLogger("options"), logging.DEBUG)
    assert "amp_database.connection" in caplog.text
    assert "canary" not in caplog.text
    assert all(
        option.secret
        for options in config.GROUPS.values()
        for option in options
        if isinstance(option, cfg.StrOpt) and ("password" in option.help or "URL" in option.help)
    )
