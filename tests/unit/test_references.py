# SPDX-License-Identifier: Apache-2.0
"""The generated references equal the output of the present code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from amphora_driver.cli.main import HELP_LINES

ROOT = Path(__file__).parents[2]


def script():
    spec = importlib.util.spec_from_file_location("generate_references", ROOT / "scripts/generate_references.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NAMES = (
    *("configuration.md", "amphora-driver.conf.sample", "cluster-configuration.md", "amphora-cluster.conf.sample"),
    *("amphoractl.md", "packages.md"),
)


def test_the_help_lines_of_amphoractl_are_current():
    text = HELP_LINES.read_text(encoding="utf-8")
    assert text == script().help_lines(), "Run: python scripts/generate_references.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_reference_is_current(name):
    text = script().DOCUMENTS[name]()
    assert text == (ROOT / "docs/reference" / name).read_text(encoding="utf-8"), (
        f"docs/reference/{name} is stale. Run: python scripts/generate_references.py"
    )
