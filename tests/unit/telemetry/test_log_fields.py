# SPDX-License-Identifier: Apache-2.0
"""Log fields: the object ids of a log line."""

import io
import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from oslo_config import cfg
from oslo_log import formatters, log

from amphora_driver import log_context


@pytest.fixture(params=["plain", "json"])
def written(request):
    """Return a logger, and a function that returns its lines."""
    conf = cfg.ConfigOpts()
    log.register_options(conf)
    conf([], project="test", default_config_files=[], default_config_dirs=[])
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    kind = formatters.JSONFormatter if request.param == "json" else formatters.ContextFormatter
    handler.setFormatter(kind() if request.param == "json" else kind(config=conf))
    logger = logging.getLogger(f"test.{request.param}")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    log_context.add_context_filter(logger)
    log_context.add_context_filter(logger)
    yield request.param, logger, lambda: text.getvalue().splitlines()
    logger.removeHandler(handler)


def fields(form, line):
    if form == "json":
        return json.loads(line)["extra"]
    words = line.partition("[-] ")[2]
    if not words.startswith("["):
        return {}
    inside = words[1:].partition("]")[0]
    names = {"lb": "load_balancer", "gen": "generation", "amphora": "amphora"}
    found = {names[name]: value for name, _, value in (word.partition("=") for word in inside.split())}
    return found | ({"generation": int(found["generation"])} if "generation" in found else {})


def test_log_lines_have_fields_inside_the_context_only(written):
    form, logger, lines = written
    logger.info("before")
    with log_context.about(load_balancer="lb1"):
        logger.info("begun")
        log_context.set_generation(7)
        logger.info("looked")
        with log_context.about(amphora="a1"):
            logger.warning("said: 100 %% of %s", "it")
        logger.info("and on")
    logger.info("after")
    about = {"load_balancer": "lb1", "generation": 7}
    expected = [{}, {"load_balancer": "lb1"}, about, {**about, "amphora": "a1"}, about, {}]
    assert [fields(form, line) for line in lines()] == expected


def test_each_thread_has_its_own_log_fields(written):
    form, logger, lines = written
    with log_context.about(load_balancer="lb1"), ThreadPoolExecutor(1) as pool:
        pool.submit(logger.info, "nothing is inherited").result()

        def push():
            with log_context.about("lb1", "a2", 3):
                logger.info("said")

        pool.submit(push).result()
    about = {"load_balancer": "lb1", "amphora": "a2", "generation": 3}
    assert [fields(form, line) for line in lines()] == [{}, about]


def test_an_error_removes_the_log_fields():
    with pytest.raises(ValueError, match="on the way"), log_context.about(load_balancer="lb1"):
        raise ValueError("on the way")
    assert log_context._fields.get() == {}
