# SPDX-License-Identifier: Apache-2.0
"""What HAProxy says when it refuses a configuration, as an error that names the object at fault.

Invariant: pure. The words are HAProxy's own, without the places of this machine's files; a word of a private key is
never among them, whatever HAProxy took the key for.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from amphora_agent.bundle import File
from amphora_agent.errors import ConfigurationRefused, MachineError
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import Configuration

ALERT = re.compile(r"^\[ALERT\]\s+\(\d+\) : (?:config : )?(?P<text>.*)$", re.MULTILINE)
_PLACE = re.compile(r"(?:[Pp]arsing )?\[(?P<file>[^\]]*):(?P<line>\d+)\]\s*:?\s*")
_NAMES = re.compile(r"'(?:server |backend |frontend )?([^' ]+)'")
_WANTED = "load the configuration into HAProxy"
_REMEDY = "The configuration served before is still served."
_KEY = "PRIVATE KEY-----"
# As much of a line of base64 as no other text has by chance.
_TELLING = 12


def refusal(
    output: str, document: Document, configuration: Configuration, files: Sequence[File], candidate: Path
) -> MachineError | ConfigurationRefused:
    """The error for what a check has printed.

    Args:
        document: what it read, in the file `candidate`.
        configuration: the document's text.
        files: what the text may name.
    """
    alert = ALERT.search(output)
    message = alert.group("text").strip() if alert else (output.strip().splitlines() or ["no reason given"])[-1]
    for directory in (document.files, candidate.parent):
        message = message if directory is None else message.replace(f"{directory}/", "")
    place = _PLACE.search(message)
    object_id = _owner_of_a_file(message, files)
    if place is not None and place.group("file") in (candidate.name, "machine.cfg"):
        number = document.line(int(place.group("line"))) if place.group("file") == candidate.name else 0
        if number < 1 and object_id is None:
            return MachineError(_WANTED, f"the machine's own part: {message}", "This is an error of the agent.")
        message = message[: place.start()] + message[place.end() :]
        if number >= 1:
            object_id = object_id or _rule_at(configuration, number) or configuration.object_at(number)
            message = f"line {number}: {message}"
    for name in _NAMES.findall(message):
        object_id = object_id or configuration.object_named(name)
    if _shows_a_key(message, files):
        message = "a file holds something else than what it is used as; HAProxy's own words would show a private key"
    return ConfigurationRefused(_WANTED, message, _REMEDY, object_id=object_id)


def _owner_of_a_file(message: str, files: Sequence[File]) -> str | None:
    """The listener or pool whose file the message names; the file named last is the innermost."""
    named = [(message.rfind(file.name), file.object_id) for file in files if file.name in message]
    return max(named)[1] if named else None


def _rule_at(configuration: Configuration, number: int) -> str | None:
    """The L7 rule after which the ACL on a line is named."""
    line = configuration.line_at(number)
    if line is not None and line.words[0] == "acl" and len(line.words) > 1:
        with suppress(ValueError):
            if str(uuid.UUID(line.words[1])) == line.words[1]:
                return line.words[1]
    return None


def _shows_a_key(message: str, files: Sequence[File]) -> bool:
    for file in files:
        if file.content is not None and _KEY in file.content:
            lines = (line.strip() for line in file.content.splitlines() if not line.startswith("-----"))
            if any(len(line) >= _TELLING and line[:_TELLING] in message for line in lines):
                return True
    return False
