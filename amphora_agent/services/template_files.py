# SPDX-License-Identifier: Apache-2.0
"""The Jinja2 templates of the agent's text files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template


@cache
def load_template(name: str) -> Template:
    """Return a template of `amphora_agent/templates`."""
    environment = Environment(  # noqa: S701 (the templates have the languages of daemons, not HTML)
        loader=FileSystemLoader(Path(__file__).parents[1] / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(name)
