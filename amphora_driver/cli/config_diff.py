# SPDX-License-Identifier: Apache-2.0
"""What an amphora would be given beside what it says it has, as lines for a person.

Invariant: pure, and no secret is in what comes out: of files only names and digests are compared, and words of a
configuration whose value is a secret are hidden on both sides before they are. What cannot be printed is escaped, and
a line is one line: what an amphora says makes no others.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import re
from typing import Any

from amphora_driver.cli.terminal_escape import plain

# The agent hides the same words (docs/reference/agent-api.md, `GET /v2/diagnostics`).
_SECRET_WORDS = re.compile(r"\b(dynamic-cookie-key|password|insecure-password)([ \t]+)\S+")
# What stands in HAProxy's file before the load balancer's part.
_END_OF_HEAD = "# From here on: the load balancer's part.\n"
_COMPARED = ("files", "interfaces", "limits", "allowed", "pings", "vrrp", "virtual_servers")


def hidden(text: str) -> str:
    """A configuration without its secrets."""
    return _SECRET_WORDS.sub(r"\1\2***", text)


def of_diagnostics(said: dict[str, Any]) -> dict[str, Any]:
    """What an agent tells that knows no `GET /v2/configuration`, in the same shape."""
    text = said.get("haproxy.cfg")
    interfaces = said.get("interfaces")
    return {
        "generation": said.get("generation"),
        "haproxy": text.partition(_END_OF_HEAD)[2] if isinstance(text, str) else None,
        "interfaces": interfaces if isinstance(interfaces, list) else [],
    }


def differences(amphora_id: str, wanted: dict[str, Any], said: dict[str, Any]) -> list[str]:
    """Lines that say what differs; none where nothing does.

    Args:
        amphora_id: whose.
        wanted: the document that it would be given.
        said: what it answers.
    """
    lines = []
    if wanted["generation"] != said.get("generation"):
        lines.append(f"generation: wanted {wanted['generation']}, amphora {amphora_id} has {said.get('generation')}")
    lines += _unified("haproxy.cfg", amphora_id, hidden(wanted["haproxy"] or ""), hidden(said.get("haproxy") or ""))
    bundle = said.get("bundle")
    if isinstance(bundle, dict):
        lines += _unified("bundle", amphora_id, _plain(_stored(wanted)), _plain(bundle))
    for one in wanted["interfaces"]:
        lines += _interface(one, said.get("interfaces"), is_pair=wanted["vrrp"] is not None)
    drift = said.get("drift")
    if isinstance(drift, dict) and drift.get("left"):
        told = (drift.get("last") or {}).get("what") or drift["left"]
        lines += [f"its agent cannot mend: {one}" for one in told]
    return [plain(line, "\t") for line in lines]


def _unified(what: str, amphora_id: str, wanted: str, said: str) -> list[str]:
    found = difflib.unified_diff(
        wanted.splitlines(), said.splitlines(), f"{what} wanted", f"{what} of amphora {amphora_id}", lineterm=""
    )
    return list(found)


def _stored(wanted: dict[str, Any]) -> dict[str, Any]:
    """As an agent writes a document down: without contents."""
    files = [
        {"name": one["name"], "sha256": hashlib.sha256(one["content"].encode()).hexdigest()} for one in wanted["files"]
    ]
    return {**wanted, "files": files}


def _plain(bundle: dict[str, Any]) -> str:
    shown = {name: _canonical(bundle.get(name)) for name in _COMPARED}
    return json.dumps(shown, indent=1, sort_keys=True)


def _canonical(value: Any) -> Any:
    """The same with addresses and networks written in one way."""
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, str):
        return _address(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_interface(text) if "/" in text else ipaddress.ip_address(text))
    except ValueError:
        return text


def _interface(wanted: dict[str, Any], said: Any, *, is_pair: bool) -> list[str]:
    """What of an interface the kernel has in another way."""
    name = wanted["name"]
    if not isinstance(said, list):
        return [f"interface {name}: its agent cannot tell"]
    found = next((one for one in said if one.get("mac") == wanted["mac"].lower()), None)
    if found is None:
        return [f"interface {name} ({wanted['mac']}) is gone"]
    lines = [] if found.get("up") else [f"interface {name} is down"]
    if found.get("name") != name:
        lines.append(f"interface {name} is called {found.get('name')}")
    if found.get("mtu") != wanted["mtu"]:
        lines.append(f"interface {name} has an MTU of {found.get('mtu')}, not {wanted['mtu']}")
    # In a pair, who has the VIPs is between the two.
    needed = [*wanted["addresses"], *([] if is_pair else wanted["vips"])]
    present = {_address(one) for one in found.get("addresses", [])}
    return lines + [f"interface {name} lacks {one}" for one in needed if _address(one) not in present]
