# SPDX-License-Identifier: Apache-2.0
"""Checks a configuration with ``haproxy -c`` (management guide, section 3), and translates its errors.

Invariant: the check does not change the serving HAProxy. An error has HAProxy's own words without the directories of
this machine, and names the object with the fault. No error shows a part of a private key.
"""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from amphora_agent.bundle import File
from amphora_agent.errors import AgentError, ConfigurationRefused, MachineError
from amphora_agent.haproxy.config_file import Document
from amphora_agent.haproxy.config_parser import Configuration, Section, common_lines
from amphora_agent.haproxy.runtime_actions import Action, RemoveServer, SetMaintenance, SetWeight

# HAProxy must read a configuration within MIN_READ_SECONDS, plus READ_SECONDS_PER_SERVER for each server. On a busy
# machine, HAProxy needs a minute for 10,000 servers.
MIN_READ_SECONDS, READ_SECONDS_PER_SERVER = 60.0, 0.02
ALERT = re.compile(r"^\[ALERT\]\s+\(\d+\) : (?:config : )?(?P<text>.*)$", re.MULTILINE)
_PLACE = re.compile(r"(?:[Pp]arsing )?\[(?P<file>[^\]]*):(?P<line>\d+)\]\s*:?\s*")
_NAMES = re.compile(r"'(?:server |backend |frontend )?([^' ]+)'")
_ACTION = "load the configuration into HAProxy"
_REMEDY = "The configuration served before is still served."
_KEY = "PRIVATE KEY-----"
# The agent hides an error message of HAProxy that contains the first _KEY_MATCH_LENGTH characters of any line of a
# private key.
_KEY_MATCH_LENGTH = 12
# From this number of servers on, the agent lets HAProxy check a shorter text without unchanged servers. With fewer
# servers, a check of the whole text is faster.
MIN_SERVERS = 50
# A new server with one of these keywords needs a check of the whole text. A `guid` must be unique in all backends, and
# `track` may name a server of another backend.
_GLOBAL_KEYWORDS = frozenset({"guid", "track"})
# Directives that name servers. The checked text must contain all servers of a backend with such a directive.
_REFERRING = frozenset({"use-server", "force-persist", "ignore-persist", "server-template"})
# Prefix of sample fetches that read the state of any server (HAProxy manual, 7.3.2). If a configuration uses such a
# fetch, the text that HAProxy checks must contain all servers.
_STATE_FETCH = "srv_"
# The parts of a server line that HAProxy checks itself when a runtime command changes them.
_CHECKED_AT_RUNTIME = re.compile(r" (?:weight [0-9]{1,3}|disabled)(?= |$)")
# HAProxy refuses lines of more than 64 words. A line below this limit may get the longest of the parts above.
_MAX_WORDS = 60


def read_timeout(configuration: Configuration) -> float:
    """Return the number of seconds in which HAProxy has to read a configuration."""
    return MIN_READ_SECONDS + READ_SECONDS_PER_SERVER * configuration.size


class Check:
    """A running check; `translate` returns the error for HAProxy's output."""

    def __init__(self, process: subprocess.Popen[str], translate: Callable[[str], AgentError], seconds: float) -> None:
        self._process = process
        self._translate = translate
        self._seconds = seconds

    def wait(self) -> None:
        """Wait for the result. A `ConfigurationRefused` has HAProxy's first error and the object at fault."""
        try:
            output, _ = self._process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired as error:
            raise MachineError("check the configuration", f"no answer within {self._seconds:.0f} s") from error
        if self._process.returncode != 0:
            raise self._translate(output)


def start_check(argv: list[str]) -> subprocess.Popen[str]:
    """Start HAProxy in the calling network namespace, which has the addresses of the file."""
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )


def translate_error(
    output: str, document: Document, configuration: Configuration, files: Sequence[File], candidate: Path
) -> MachineError | ConfigurationRefused:
    """Return the error for the output of a check of a document in the file `candidate`."""
    alert = ALERT.search(output)
    message = alert.group("text").strip() if alert else (output.strip().splitlines() or ["no reason given"])[-1]
    for directory in (document.files, candidate.parent):
        message = message if directory is None else message.replace(f"{directory}/", "")
    place = _PLACE.search(message)
    object_id = _owner_of_a_file(message, files)
    if place is not None and place.group("file") in (candidate.name, "machine.cfg"):
        number = document.line(int(place.group("line"))) if place.group("file") == candidate.name else 0
        if number < 1 and object_id is None:
            return MachineError(_ACTION, f"the agent's own part: {message}", "This is an error of the agent.")
        message = message[: place.start()] + message[place.end() :]
        if number >= 1:
            object_id = object_id or _l7_rule_at(configuration, number) or configuration.object_at(number)
            message = f"line {number}: {message}"
    for name in _NAMES.findall(message):
        object_id = object_id or configuration.object_named(name)
    if _shows_a_key(message, files):
        message = "a TLS file has the wrong content; HAProxy's message shows a private key and is hidden"
    return ConfigurationRefused(_ACTION, message, _REMEDY, object_id=object_id)


def _owner_of_a_file(message: str, files: Sequence[File]) -> str | None:
    """Return the listener or pool of the innermost file, which the message names last."""
    named = [(message.rfind(file.name), file.object_id) for file in files if file.name in message]
    return max(named)[1] if named else None


def _l7_rule_at(configuration: Configuration, number: int) -> str | None:
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
            if any(len(line) >= _KEY_MATCH_LENGTH and line[:_KEY_MATCH_LENGTH] in message for line in lines):
                return True
    return False


def is_needed(before: Document, wanted: Document, configuration: Configuration, actions: Sequence[Action]) -> bool:
    """Return whether a check of a document may have another result than the check of the document before.

    No check is needed if HAProxy has carried out all actions, and the texts differ in removed servers, weights and the
    word ``disabled`` only. HAProxy has then accepted each line of the document, in this order.

    Args:
        before: the document that HAProxy has checked and runs.
        configuration: the parsed text of the wanted document.
        actions: the actions of the runtime update from one document to the other.
    """
    verified = RemoveServer | SetMaintenance | SetWeight
    if before.head != wanted.head or not all(isinstance(one, verified) for one in actions):
        return True
    same = common_lines(before.text, wanted.text)
    old, new = (text[same.begin : len(text) - same.end].split("\n") for text in (before.text, wanted.text))
    accepted = map(_accepted_part, old)
    if any(len(line.split()) > _MAX_WORDS or _accepted_part(line) not in accepted for line in new):
        return True
    return _refers_to_servers(configuration)


def _accepted_part(line: str) -> str:
    return _CHECKED_AT_RUNTIME.sub("", line) if line.lstrip().startswith("server ") else line


def _refers_to_servers(configuration: Configuration) -> bool:
    """Whether a line or a server may refer to a server."""
    return _fetches_state(configuration) or not all(map(_is_simple, configuration.sections))


def omit_checked_servers(text: str, wanted: Configuration, accepted: Configuration) -> str:
    """Return a short text whose check has the same result as the check of the text of `wanted`.

    A server is omitted if the running, `accepted` configuration has the same line in the same backend. The whole
    backend stays if it refers to more than one server. Each line keeps its number. `wanted` was parsed after
    `accepted`, so equal lines are the same objects. HAProxy 2.6 compares each server of a backend with each other:
    10,000 servers take a second or more.
    """
    if wanted.size < MIN_SERVERS or _fetches_state(wanted):
        return text
    lines = text.split("\n")
    ends = (*(section.number for section in wanted.sections[1:]), len(wanted.rows) + 1)
    for section, end in zip(wanted.sections, ends, strict=True):
        was = accepted.backends.get(section.name) if section.kind == "backend" and _is_simple(section) else None
        known = set(map(id, was.servers)) if was is not None else set()
        if any(
            server.related and id(server) not in known and not _GLOBAL_KEYWORDS.isdisjoint(server.keywords)
            for server in section.servers
        ):
            return text
        if known:
            first, last = section.number - 1, end - 1
            rows = zip(wanted.rows[first:last], lines[first:last], strict=True)
            lines[first:last] = ["" if id(row) in known else line for row, line in rows]
    return "\n".join(lines)


def _fetches_state(configuration: Configuration) -> bool:
    return any(_STATE_FETCH in word for one in configuration.sections for line in one.lines for word in line.words)


def _is_simple(section: Section) -> bool:
    """Whether HAProxy checks each server of the backend independently of the others."""
    return (
        len(section.by_name) == len(section.servers)
        and not any(line.words[0] in _REFERRING for line in section.lines)
        and not section.related
    )
