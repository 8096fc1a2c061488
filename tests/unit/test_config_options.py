# SPDX-License-Identifier: Apache-2.0
"""The operator's options: every help text has the unit, the range, and the meaning of a missing default."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from oslo_config import cfg

from amphora_cluster import config as cluster
from amphora_driver import config
from amphora_driver.config import opts

ROOT = Path(__file__).parents[2]
UNITS = ("second", "millisecond", "days", "mib", "percentage", "fraction", "number", "tcp port", "udp port")
EVERY = config.GROUPS | cluster.GROUPS
OPTIONS = [(group, option) for group, options in EVERY.items() for option in options]
every_option = pytest.mark.parametrize(
    ("group", "option"), OPTIONS, ids=[f"{group}.{option.name}" for group, option in OPTIONS]
)


def numeric(option):
    return isinstance(option, cfg.IntOpt | cfg.FloatOpt | cfg.PortOpt)


@every_option
def test_a_help_text_is_a_sentence(group, option):
    assert option.help[0].isupper() or option.help.startswith(option.name)
    assert option.help.endswith(".")


@every_option
def test_a_number_has_a_unit_and_limits(group, option):
    if not numeric(option):
        return
    text = option.help.lower()
    assert any(unit in text for unit in UNITS)
    for limit in (option.type.min, option.type.max):
        assert limit is None or f"{limit:.0f}" in text or f"{limit:g}" in text
    assert option.type.min is not None


@every_option
def test_the_description_explains_a_missing_default(group, option):
    if option.default is None or option.default == []:
        assert "efault" in option.help


def test_each_group_is_in_one_module():
    modules = [one.OPTIONS for one in opts._MODULES]
    assert sum(len(one) for one in modules) == len(config.GROUPS)
    files = {path.stem for path in (ROOT / "amphora_driver/config").glob("*.py")} - {"__init__", "opts"}
    assert files == {one.__name__.rpartition(".")[2] for one in opts._MODULES}


def test_the_generator_of_oslo_finds_the_options():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = setup["options.entry_points"]["oslo.config.opts"].split("\n")[1:]
    assert dict(line.split(" = ") for line in lines) == {
        "octavia_amphora_driver": f"{opts.__name__}:{opts.list_opts.__name__}",
        "octavia_amphora_cluster": f"{cluster.__name__}:{cluster.list_opts.__name__}",
    }


def test_no_group_collides_with_a_group_of_octavia():
    """Octavia has [amp_drift], [amp_certificates] and [amp_compute]; one file may contain the options of both."""
    assert [group for group in EVERY if not group.startswith("amp_")] == []
