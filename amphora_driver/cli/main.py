# SPDX-License-Identifier: Apache-2.0
"""`amphoractl`, the operator's command line.

Invariant: commands read the database, so their output does not depend on other processes of the control plane. A
command that writes can be repeated. No command shows a secret, encrypted or not. Untrusted text reaches a terminal only
as printable characters.

In the read-only mode, commands read records from the status page of a process. amphoractl then opens no database, no
key and no configuration file, and refuses all other commands.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from autopage.argparse import help_pager, use_color_for_parser
from cliff.app import App
from cliff.commandmanager import CommandManager
from cliff.help import HelpCommand, HelpExit

from amphora_driver.cli.command import Command
from amphora_driver.cli.formatting import escaping_stream
from amphora_driver.errors import ConfigurationError
from amphora_driver.installation import CONFIG_FILE, CONFIG_VARIABLE, find_plugins, installed_version

if TYPE_CHECKING:
    import sqlalchemy as sa
    from oslo_config.cfg import ConfigOpts

    from amphora_driver.database.engine import Database
    from amphora_driver.database.schema_check import SchemaState
    from amphora_driver.sources import Sources
    from amphora_driver.telemetry.records import Scope
    from amphora_driver.telemetry.records_client import StatusPageRecords

COMMANDS = "amphoractl.commands"
# First lines of the help of the commands, by name. `scripts/generate_references.py` writes the file.
HELP_LINES = Path(__file__).with_name("help_lines.json")
URL_VARIABLE = "AMPHORACTL_STATUS_URL"
TOKEN_VARIABLE = "AMPHORACTL_STATUS_TOKEN_FILE"  # noqa: S105 - the name of a variable with a path
CA_VARIABLE = "AMPHORACTL_STATUS_CA_FILE"
# Objects between two searches for cyclic garbage (default: 700). The imports create several 100,000 objects that remain
# until the end of the process. The default costs a tenth of a short command.
_GARBAGE_THRESHOLD = 50_000
T = TypeVar("T")


class LazyCommands(CommandManager):
    """The commands of a group of entry points. The class of a command is imported at its use."""

    def load_commands(self, namespace: str) -> None:
        """Add the commands of a group without an import.

        The method of the base class imports the classes of all commands, for which it needs half of the time of a
        command.
        """
        self.group_list.append(namespace)
        found = {one.name.replace("_", " "): one for one in find_plugins(namespace)}
        self.commands |= {name: one for name, one in found.items() if name not in self.commands}


class Help(HelpCommand):
    """The command `help`. Without the words of a command, it prints the overview."""

    _description = "print detailed help for another command"

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        if parsed_args.cmd:
            return int(super().take_action(parsed_args))
        self.app.print_overview()
        return 0


class Amphoractl(App):
    """The application. Commands read with `read`; commands that write use `database`."""

    NAME = "amphoractl"

    def __init__(self, commands: CommandManager | None = None, **streams: Any) -> None:
        super().__init__(
            description="Show and operate load balancers, amphorae and controllers; maintain database and keys.",
            version=installed_version(),
            command_manager=LazyCommands(COMMANDS) if commands is None else commands,
            deferred_help=True,
            **streams,
        )
        # The library cliff writes untrusted text to these streams with its own loggers and formatters. So the streams
        # escape unprintable characters.
        self.stdout: TextIO = escaping_stream(streams.get("stdout") or sys.stdout)
        self.stderr: TextIO = escaping_stream(streams.get("stderr") or sys.stderr)
        self.command_manager.add_command("help", Help)
        self._sources: Sources | None = None

    @property
    def sources(self) -> Sources:
        """Configuration, database or status page of the commands."""
        if self._sources is None:
            # SQLAlchemy and oslo.config need most of the time of an import. The version and the help need neither.
            from amphora_driver.sources import Sources  # noqa: PLC0415

            self._sources = Sources(self.options, TOKEN_VARIABLE)
        return self._sources

    @property
    def records(self) -> StatusPageRecords | None:
        """See `Sources.records`."""
        return self.sources.records

    @property
    def conf(self) -> ConfigOpts:
        """See `Sources.conf`."""
        return self.sources.conf

    @property
    def database(self) -> Database:
        """See `Sources.database`."""
        return self.sources.database

    def read(self, work: Callable[[sa.Connection], T], scope: Scope | None = None) -> T:
        """See `Sources.read`."""
        return self.sources.read(work, scope)

    def recorded_schema(self) -> SchemaState:
        """See `Sources.recorded_schema`."""
        return self.sources.recorded_schema()

    def build_option_parser(
        self, description: str | None, version: str | None, argparse_kwargs: dict[str, Any] | None = None
    ) -> argparse.ArgumentParser:
        # By default, argparse accepts abbreviated options. It would read `--status` of a command as an abbreviation of
        # `--status-url`.
        named = {"prog": self.NAME, "allow_abbrev": False, **(argparse_kwargs or {})}
        parser: argparse.ArgumentParser = super().build_option_parser(description, version, named)
        default = f"Default: ${CONFIG_VARIABLE} or {CONFIG_FILE}."
        words = f"Configuration file; can be repeated. {default}"
        parser.add_argument("--config-file", action="append", metavar="FILE", help=words)
        for name, (variable, metavar, text) in READ_ONLY_OPTIONS.items():
            help_text = f"{text} Default: ${variable}."
            parser.add_argument(name, default=os.environ.get(variable), metavar=metavar, help=help_text)
        return parser

    def print_help_if_requested(self) -> None:
        """Print the overview and end the program, if the option `--help` is given without a command."""
        if self.options.deferred_help:
            self.print_overview()
            raise HelpExit

    def print_overview(self) -> None:
        """Print the options, and the first line of the help of each command.

        The function of the base class imports all commands for this.
        """
        lines = json.loads(HELP_LINES.read_text(encoding="utf-8"))
        pager = help_pager(self.stdout)
        color = pager.to_terminal()
        use_color_for_parser(self.parser, color)
        underlined, name_color, note_color = ("\033[4m{}\033[0m", "\033[36m{}\033[39m", "\033[90m{}\033[39m")
        with pager as out:
            self.parser.print_help(out)
            out.write(f"\n{underlined.format('Commands') if color else 'Commands'}:\n")
            for name, point in sorted(self.command_manager):
                line, note = (lines[name], "") if name in lines else _describe(self, point)
                shown = f"{name:<13}"
                note = note_color.format(note) if color else note
                out.write(f"  {name_color.format(shown) if color else shown}  {line}{note}\n")

    def prepare_to_run_command(self, cmd: object) -> None:
        """Refuse a command that the read-only mode does not have; the help is always possible."""
        if self.options.status_url and isinstance(cmd, Command) and not cmd.read_only_mode:
            happened = "--status-url gives read access to records only, and this command needs the database or a key"
            remedy = f"Run it without --status-url and {URL_VARIABLE}, on a host with the driver's configuration."
            raise ConfigurationError("run the command", happened, remedy)

    def clean_up(self, cmd: object, result: int, err: BaseException | None) -> None:
        super().clean_up(cmd, result, err)
        if self._sources is not None:
            self._sources.close()


# Options of the read-only mode: environment variable, value and help text.
READ_ONLY_OPTIONS = {
    "--status-url": (
        URL_VARIABLE,
        "URL",
        "Read-only mode: read from this status page (https://HOST:PORT), without database, keys and configuration.",
    ),
    "--status-token-file": (
        TOKEN_VARIABLE,
        "FILE",
        "File with the token of the status page in its first line; the token itself is never an argument.",
    ),
    "--status-ca-file": (
        CA_VARIABLE,
        "FILE",
        "PEM file with the CA of the status page, if the operating system does not trust it.",
    ),
}


def _describe(app: Amphoractl, point: Any) -> tuple[str, str]:
    """Return the help line of a command of another distribution, and the name of the distribution."""
    package = point.value.partition(":")[0].partition(".")[0]
    try:
        line = point.load()(app, None).get_description().partition("\n")[0].rstrip(".")
    except Exception as error:  # noqa: BLE001 - a broken plug-in must not hide the other commands
        line = f"Could not load {point.value}: {error}"
    distribution = getattr(point, "dist", None)
    return line, f" ({distribution.name if distribution else package})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; None for the arguments of this process."""
    if argv is None:
        gc.set_threshold(_GARBAGE_THRESHOLD)
    arguments = list(sys.argv[1:] if argv is None else argv)
    return int(Amphoractl().run(arguments or ["help"]))


if __name__ == "__main__":
    sys.exit(main())
