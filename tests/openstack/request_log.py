# SPDX-License-Identifier: Apache-2.0
"""Counts the requests of Octavia's account to Nova, Neutron and Glance, from the logs of the services."""

import re
from collections import Counter

_SERVICES = ("nova", "neutron", "glance")
# `serve_wsgi.py` writes these lines. Octavia and its provider share one account.
_LINE = re.compile(r"^request octavia ([A-Z]+) (\S+)", re.MULTILINE)
_VERSION = re.compile(r"v\d+(\.\d+)?")


class RequestLog:
    """The requests since the creation of this object, or since the last call of `counted`."""

    def __init__(self, cloud):
        self._files = {name: cloud.folder / f"{name}.log" for name in _SERVICES}
        self._read = {name: file.stat().st_size for name, file in self._files.items()}

    def counted(self):
        """Return the number of requests by service, and by method and collection."""
        return {name: Counter(self._new(name)) for name in _SERVICES}

    def _new(self, name):
        with self._files[name].open("rb") as log:
            log.seek(self._read[name])
            text = log.read()
        # The last line may be incomplete.
        complete = text[: text.rfind(b"\n") + 1]
        self._read[name] += len(complete)
        for method, path in _LINE.findall(complete.decode(errors="replace")):
            # Names of collections and ids of objects alternate.
            collections = [part for part in path.split("/") if part and not _VERSION.fullmatch(part)][::2]
            # Without a collection it is the question for the versions of the service, once in a process.
            if collections:
                yield f"{method} {'/'.join(collections)}"


def writes(counted):
    """The requests that write, of the number of requests of a service."""
    return {name: number for name, number in counted.items() if not name.startswith("GET ")}
