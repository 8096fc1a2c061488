# SPDX-License-Identifier: Apache-2.0
"""The overview of the commands, which `amphoractl --help` prints."""

import inspect
import io
from contextlib import suppress

import pytest
from cliff.command import Command
from cliff.help import HelpExit

from amphora_driver.cli.main import COMMANDS, Amphoractl, LazyCommands


class Foreign(Command):
    """Do something else. It is not a command of this project."""

    __module__ = "elsewhere.commands"

    def take_action(self, parsed_args):
        raise AssertionError


class Broken(Foreign):
    __module__ = "elsewhere.commands"

    def get_description(self):
        raise ValueError("no text")


@pytest.mark.parametrize("words", [["--help"], ["help"]])
def test_the_overview_has_a_line_for_each_command(entry_points, resolve, words):
    """The lines of the commands of this project come from a file, and those of others from their classes."""
    commands = LazyCommands(COMMANDS)
    commands.add_command("else do", Foreign)
    commands.add_command("else fail", Broken)
    out = io.StringIO()
    with suppress(HelpExit):
        assert Amphoractl(commands, stdout=out).run(words) == 0
    lines = out.getvalue().partition("\nCommands:\n")[2].splitlines()
    for name, target in entry_points(COMMANDS):
        text = inspect.getdoc(resolve(target)).partition("\n")[0].rstrip(".")
        assert f"  {name.replace('_', ' '):<13}  {text}" in lines
    assert "  else do        Do something else. It is not a command of this project (elsewhere)" in lines
    assert "  else fail      Could not load elsewhere.commands:Broken: no text (elsewhere)" in lines
