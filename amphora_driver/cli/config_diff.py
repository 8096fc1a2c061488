# SPDX-License-Identifier: Apache-2.0
"""Compare the desired bundle of an amphora with the agent's answer, as text. The functions do no I/O.

Invariant: the result contains no secret. The comparison uses names and digests of files, and masks secret values of a
configuration on both sides. It escapes unprintable characters, so an amphora cannot add lines.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import json
import re
from typing import Any

from amphora_driver.cli.formatting import escape_unprintable

# amphoractl masks the values after secret keywords of haproxy.cfg, because the agent masks the same values in `GET
# /v2/diagnostics` (docs/reference/agent-api.md).
_SECRET_WORDS = re.compile(r"\b(dynamic-cookie-key|password|insecure-password)([ \t]+)\S+")
# In haproxy.cfg, this line separates the agent's part from the load balancer's part.
_END_OF_AGENT_PART = "# From here on: the load balancer's part.\n"
_COMPARED = ("files", "interfaces", "limits", "allowed", "pings", "vrrp", "virtual_servers")


def mask_secrets(text: str) -> str:
    """Return a configuration with `***` in place of each secret."""
    return _SECRET_WORDS.sub(r"\1\2***", text)


def from_diagnostics(actual: dict[str, Any]) -> dict[str, Any]:
    """Convert the diagnostics of an old agent to the document of `GET /v2/configuration`."""
    text = actual.get("haproxy.cfg")
    interfaces = actual.get("interfaces")
    return {
        "generation": actual.get("generation"),
        "haproxy": text.partition(_END_OF_AGENT_PART)[2] if isinstance(text, str) else None,
        "interfaces": interfaces if isinstance(interfaces, list) else [],
    }


def list_differences(amphora_id: str, desired: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return lines that describe the differences between the desired bundle and the agent's answer."""
    lines = []
    if desired["generation"] != actual.get("generation"):
        lines.append(f"generation: wanted {desired['generation']}, amphora {amphora_id} has {actual.get('generation')}")
    files = (mask_secrets(one.get("haproxy") or "") for one in (desired, actual))
    lines += _unified("haproxy.cfg", amphora_id, *files)
    bundle = actual.get("bundle")
    if isinstance(bundle, dict):
        lines += _unified("bundle", amphora_id, _canonical_text(_as_stored(desired)), _canonical_text(bundle))
    for one in desired["interfaces"]:
        lines += _interface(one, actual.get("interfaces"), is_pair=desired["vrrp"] is not None)
    drift = actual.get("drift")
    if isinstance(drift, dict) and drift.get("unrepaired"):
        found = (drift.get("last") or {}).get("sentences") or drift["unrepaired"]
        lines += [f"the agent cannot repair: {one}" for one in found]
    return [escape_unprintable(line, "\t") for line in lines]


def _unified(what: str, amphora_id: str, desired: str, actual: str) -> list[str]:
    names = (f"{what} wanted", f"{what} of amphora {amphora_id}")
    return list(difflib.unified_diff(desired.splitlines(), actual.splitlines(), *names, lineterm=""))


def _as_stored(desired: dict[str, Any]) -> dict[str, Any]:
    """Return the bundle as an agent stores it: with digests in place of contents."""
    digests = [(one["name"], hashlib.sha256(one["content"].encode()).hexdigest()) for one in desired["files"]]
    return {**desired, "files": [{"name": name, "sha256": digest} for name, digest in digests]}


def _canonical_text(bundle: dict[str, Any]) -> str:
    return json.dumps({name: _canonical(bundle.get(name)) for name in _COMPARED}, indent=1, sort_keys=True)


def _canonical(value: Any) -> Any:
    """Return the value with addresses, networks and numbers in their canonical form."""
    if isinstance(value, dict):
        return {key: _canonical(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_canonical(one) for one in value]
    if isinstance(value, str):
        return _canonical_address(value)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _canonical_address(text: str) -> str:
    try:
        return str(ipaddress.ip_interface(text) if "/" in text else ipaddress.ip_address(text))
    except ValueError:
        return text


def _interface(desired: dict[str, Any], actual: Any, *, is_pair: bool) -> list[str]:
    """Return the differences between the desired interface and the kernel's."""
    name = desired["name"]
    if not isinstance(actual, list):
        return [f"interface {name}: the agent does not report it"]
    found = next((one for one in actual if one.get("mac") == desired["mac"].lower()), None)
    if found is None:
        return [f"interface {name} ({desired['mac']}) is gone"]
    lines = [] if found.get("up") else [f"interface {name} is down"]
    if found.get("name") != name:
        lines.append(f"interface {name} has the name {found.get('name')}")
    if found.get("mtu") != desired["mtu"]:
        lines.append(f"interface {name} has an MTU of {found.get('mtu')}, not {desired['mtu']}")
    # In a pair of amphorae, VRRP decides which amphora holds the VIPs, so a missing VIP on one amphora is no
    # difference.
    needed = [*desired["addresses"], *([] if is_pair else desired["vips"])]
    present = {_canonical_address(one) for one in found.get("addresses", [])}
    return lines + [f"interface {name} lacks {one}" for one in needed if _canonical_address(one) not in present]
