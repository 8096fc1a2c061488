# SPDX-License-Identifier: Apache-2.0
"""Repeated messages: the log has the first one, and one line in each interval."""

import io
import logging
import re
import subprocess
import sys
import time

import pytest
from oslo_config import cfg
from oslo_log import formatters, log

from amphora_driver import log_context, repeated_messages
from amphora_driver.repeated_messages import Occurrence, Repetitions

TEXT = "the controller cannot claim jobs and tries again in %g s: %s"


@pytest.fixture
def repetitions():
    return Repetitions(interval=60.0)


@pytest.fixture
def logger(repetitions):
    """A logger with two handlers. The attribute `lines` has the lines of both."""
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf([], project="test", default_config_files=[], default_config_dirs=[])
    texts = [io.StringIO(), io.StringIO()]
    made = logging.getLogger("test.repeated")
    made.propagate = False
    made.setLevel(logging.INFO)
    handlers = [logging.StreamHandler(text) for text in texts]
    for handler in handlers:
        handler.setFormatter(formatters.ContextFormatter(config=conf))
        handler.addFilter(log_context.ContextFilter())
        handler.addFilter(repeated_messages.RepetitionFilter(repetitions))
        made.addHandler(handler)

    def lines():
        first, second = ([line.partition("[-] ")[2] for line in text.getvalue().splitlines()] for text in texts)
        assert first == second
        return first

    made.lines = lines
    yield made
    made.propagate = True
    for handler in handlers:
        made.removeHandler(handler)


def test_a_message_is_logged_at_once_and_then_once_per_interval(repetitions):
    logged = {at: found for at in range(200) if (found := repetitions.add("away", float(at)))}
    assert logged == {
        0: Occurrence(1, 0.0),
        60: Occurrence(61, 0.0),
        120: Occurrence(121, 0.0),
        180: Occurrence(181, 0.0),
    }


def test_a_message_after_a_pause_is_a_new_one_and_omitted_occurrences_are_counted(repetitions):
    times = (0.0, 30.0, 700.0, 800.0)
    assert [repetitions.add("away", at) for at in times] == [
        Occurrence(1, 0.0),
        None,
        Occurrence(3, 0.0),
        Occurrence(1, 800.0),
    ]


def test_messages_after_the_end_of_an_outage_are_logged_at_once(repetitions):
    assert [repetitions.add("away", at) for at in (0.0, 1.0)] == [Occurrence(1, 0.0), None]
    repetitions.end()
    assert [repetitions.add("away", at) for at in (2.0, 3.0)] == [Occurrence(3, 0.0), None]


def test_a_clock_that_is_set_back_omits_no_message_for_long(repetitions):
    assert [bool(repetitions.add("away", at)) for at in (1000.0, 10.0, 20.0, 71.0)] == [True, True, False, True]


def test_the_number_of_messages_in_memory_is_limited():
    repetitions = Repetitions(interval=60.0, capacity=2)
    for at, message in enumerate("abca"):
        assert repetitions.add(message, float(at)) == Occurrence(1, float(at))
    assert len(repetitions._known) == 2
    assert repetitions.add("c", 5.0) is None


def test_a_repeated_line_has_the_number_and_the_beginning(logger, monkeypatch):
    now = [1_000_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(now[0] * 1e9))
    for _ in range(61):
        logger.warning(TEXT, 1, OSError("100% away"))
        now[0] += 1.0
    first, second = logger.lines()
    assert first == "the controller cannot claim jobs and tries again in 1 s: 100% away"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_000_000_000.0))
    assert second == f"{first} (occurred 61 times since {since})"


def test_different_messages_do_not_hide_each_other(logger):
    away, refused = OSError("away"), OSError("refused")
    for _ in range(3):
        logger.warning(TEXT, 1, away)
        logger.warning(TEXT, 1, refused)
        logger.error(TEXT, 1, away)
        logger.warning("another text: %s", away)
        with log_context.about(load_balancer="lb1"):
            logger.warning(TEXT, 1, away)
        with log_context.about(load_balancer="lb2"):
            logger.warning(TEXT, 1, away)
    assert len(logger.lines()) == 6
    logging.getLogger("test.repeated.other").warning(TEXT, 1, away)
    assert len(logger.lines()) == 7


def test_tracebacks_from_different_places_do_not_hide_each_other(logger):
    def first():
        raise KeyError("name")

    def second():
        raise KeyError("name")

    for fail in (first, second, first, second):
        try:
            fail()
        except KeyError:
            logger.exception("a round failed unexpectedly")
    assert "\n".join(logger.lines()).count("a round failed unexpectedly") == 2


def test_events_and_messages_of_lower_levels_are_not_limited(logger):
    for _ in range(2):
        logger.warning("the self-test failed: %s", "no recent flush")
        logger.info("the self-test succeeds again")
        logger.info("the controller repeats the audit later: %s", OSError("away"))
    assert len(logger.lines()) == 6


def test_a_message_that_cannot_be_formatted_is_not_omitted(repetitions):
    """Logging itself reports the wrong arguments."""
    limit = repeated_messages.RepetitionFilter(repetitions)
    wrong = {"msg": "%d jobs", "args": (OSError("three"),), "levelno": logging.WARNING}
    assert [limit.filter(logging.makeLogRecord(wrong)) for _ in range(2)] == [True, True]


def test_the_filter_is_added_once_to_each_handler():
    made = logging.getLogger("test.once")
    made.addHandler(logging.NullHandler())
    repeated_messages.add_filter(made)
    repeated_messages.add_filter(made)
    assert len(made.handlers[0].filters) == 1
    made.handlers.clear()


def test_the_log_of_a_process_has_the_filter():
    """A process begins with `log_context.setup`, which configures the handlers of the root logger."""
    program = """
import logging
from oslo_config import cfg
from oslo_log import log
from amphora_driver import log_context
conf = cfg.ConfigOpts()
log.register_options(conf)
conf([], project="test", default_config_files=[], default_config_dirs=[])
log_context.setup(conf, "test")
for _ in range(3):
    logging.getLogger("amphora_driver.test").warning("%s", OSError("away"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert len(re.findall("away", done.stdout + done.stderr)) == 1
