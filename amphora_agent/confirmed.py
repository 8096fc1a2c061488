# SPDX-License-Identifier: Apache-2.0
"""The last confirmed bundle.

Invariant: what is on disk was served when it was written, and is replaced as a whole or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from amphora_agent.bundle import Bundle, digest, parse
from amphora_agent.errors import AgentError, MachineError
from amphora_agent.paths import write_atomically


@dataclass(frozen=True)
class Confirmed:
    """A bundle that HAProxy has confirmed."""

    bundle: Bundle
    body: bytes
    applied_at: str

    def document(self) -> dict[str, object]:
        return {
            "generation": self.bundle.generation,
            "applied_at": self.applied_at,
            "digest": digest(self.body),
        }


def now_confirmed(bundle: Bundle, body: bytes) -> Confirmed:
    """A bundle that is confirmed as of now."""
    moment = datetime.now(timezone.utc).replace(microsecond=0)
    return Confirmed(bundle, body, moment.isoformat().replace("+00:00", "Z"))


def write(path: Path, confirmed: Confirmed) -> None:
    """Write it down."""
    body = confirmed.body.decode()
    write_atomically(path, json.dumps({"applied_at": confirmed.applied_at, "body": body}))


def read(path: Path) -> Confirmed | None:
    """The one written last; None on an amphora that never confirmed any.

    Raises:
        MachineError: there is a file, but it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        body = document["body"].encode()
        return Confirmed(parse(body), body, document["applied_at"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AgentError) as error:
        raise MachineError(f"read {path}", str(error), "Push the bundle again.") from error
