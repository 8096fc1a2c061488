# SPDX-License-Identifier: Apache-2.0
"""The command of the sandbox: ``python -m sandbox up|demo|status|down … --state DIR``.

Invariant: the terminal shows results, progress and the paths of the logs. The logs have all other messages.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from amphora_driver.errors import AmphoraDriverError
from amphora_driver.host import namespaces
from sandbox import settings as sandbox_settings
from sandbox.settings import Settings
from sandbox.stack import Stack

_REQUESTS = 12


class _Screen:
    """Prints steps and their duration to the terminal."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._begun = self._last = time.monotonic()

    def step(self, text: str) -> None:
        now = time.monotonic()
        self.console.print(f"  [green]✓[/] {text} [dim]{now - self._last:.1f} s[/]")
        self._last = now

    def note(self, text: str) -> None:
        self.console.print(f"  [dim]· {text}[/]", soft_wrap=True)

    def end(self, text: str) -> None:
        self.console.print(f"[bold]{text}[/] [dim]{time.monotonic() - self._begun:.1f} s[/]")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of ``python -m sandbox``."""
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("commands", nargs="+", choices=sorted(_COMMANDS), metavar="|".join(_COMMANDS))
    add("--state", type=Path, required=True, help="state directory of this sandbox")
    add("--prefix", help="prefix of namespace names, at most 6 characters; first start only")
    add("--agent-python", help="Python interpreter of the agents; first start only")
    add("--database-url", help="SQLAlchemy URL of the provider's database (default: SQLite); first start only")
    add("--broker-url", help="URL of RabbitMQ, for Celery as the queue engine; first start only")
    add("--compute", choices=["netns", "qemu"], help="compute backend of the amphorae; first start only")
    add("--images", type=Path, help="directory with the images of virtual machines; first start only")
    chosen = parser.parse_args(arguments)
    screen = _Screen()
    try:
        for command in chosen.commands:
            _COMMANDS[command](chosen, screen)
    except AmphoraDriverError as error:
        screen.console.print(f"✗ {error}", style="red", markup=False, soft_wrap=True)
        return 1
    return 0


def _up(chosen: argparse.Namespace, screen: _Screen) -> None:
    settings = sandbox_settings.load_or_create_settings(
        chosen.state.absolute(),
        chosen.prefix,
        chosen.agent_python,
        store_url=chosen.database_url,
        broker_url=chosen.broker_url,
        compute=chosen.compute,
        images=None if chosen.images is None else str(chosen.images.absolute()),
    )
    Stack(settings, screen.step, screen.note).up()
    screen.end(f"The sandbox runs. Octavia's API: {settings.endpoint}, logs: {os.path.relpath(settings.log)}.")
    if settings.status_port:
        screen.console.print(f"Status page: {settings.status_page}", soft_wrap=True)


def _down(chosen: argparse.Namespace, screen: _Screen) -> None:
    settings = sandbox_settings.load_settings(chosen.state.absolute())
    if settings is not None:
        Stack(settings, screen.step).down()
    screen.end("The sandbox is stopped.")


def _status(chosen: argparse.Namespace, screen: _Screen) -> None:
    settings = _load_existing(chosen)
    stack = Stack(settings)
    table = Table("program", "process", "log")
    for program in stack.programs():
        process = stack.supervision.running(program.name)
        pid = str(process.pid) if process else "[red]-[/]"
        table.add_row(program.name, pid, str(stack.supervision.log(program.name)))
    screen.console.print(table)
    screen.console.print("namespaces:", ", ".join(namespaces.names(f"{settings.prefix}-")) or "none")
    if stack.supervision.running("status-page") is not None:
        screen.console.print(f"status page: {settings.status_page}", soft_wrap=True)
    if stack.supervision.running("octavia-api") is not None:
        _print_load_balancers(settings, screen)


def _print_load_balancers(settings: Settings, screen: _Screen) -> None:
    from sandbox import demo  # noqa: PLC0415 - the import of the clients takes most of a second

    table = Table("load balancer", "VIP", "provisioning", "operating")
    for one in demo.connect(settings).load_balancer.load_balancers():
        table.add_row(one.name or one.id, one.vip_address, one.provisioning_status, one.operating_status)
    screen.console.print(table)


def _demo(chosen: argparse.Namespace, screen: _Screen) -> None:
    from sandbox import demo  # noqa: PLC0415 - the import of the clients takes most of a second

    settings = _load_existing(chosen)
    load_balancer = demo.ensure_load_balancer(settings, screen.step, screen.note)
    demo.wait_for_response(settings, load_balancer.vip_address, screen.note)
    answers = demo.count_responses(settings, load_balancer.vip_address, _REQUESTS)
    screen.step(f"{_REQUESTS} requests from the client to http://{load_balancer.vip_address}/")
    table = Table("member", "answers")
    for member, number in sorted(answers.items()):
        table.add_row(member, str(number))
    screen.console.print(table)
    _print_hints(settings, load_balancer.vip_address, screen)


def _print_hints(settings: Settings, vip: str, screen: _Screen) -> None:
    lines = [
        f"source {os.path.relpath(settings.env)}",
        "openstack loadbalancer status show demo",
        "openstack loadbalancer member set --weight 5 demo-pool member1",
        "openstack loadbalancer failover demo",
        "amphoractl amphora list",
        f"nsenter --net={namespaces.path(settings.host('client'))} curl http://{vip}/",
        "./quickstart status",
        "./quickstart down",
    ]
    screen.console.print("\nExamples:")
    for line in lines:
        screen.console.print(f"  {line}", soft_wrap=True, markup=False)


def _load_existing(chosen: argparse.Namespace) -> Settings:
    settings = sandbox_settings.load_settings(chosen.state.absolute())
    if settings is None:
        attempt = f"find a sandbox in {chosen.state}"
        raise sandbox_settings.SandboxError(attempt, "it was never started", "Run `up` first.")
    return settings


_COMMANDS = {"up": _up, "demo": _demo, "status": _status, "down": _down}

if __name__ == "__main__":
    sys.exit(main())
