# SPDX-License-Identifier: Apache-2.0
"""Metadata that an operator attaches to flavors and availability zones, checked against a JSON schema.

Invariant: checking reads the caller's object and never changes it; a refusal names the key. The schema lists
everything Octavia's operators know; `served` says which keys, and which of their values, work here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib import resources
from typing import Any

import jsonschema

from amphora_driver.errors import UnsupportedOption

NOT_YET = "this provider does not serve it yet"


class Schema:
    """One kind of metadata.

    Args:
        what: its name in sentences ("flavor").
        file_name: a JSON schema (draft-07) beside this module.
        served: keys that are served, each with the only values that are; None stands for every value the
            schema takes.
    """

    def __init__(self, what: str, file_name: str, served: Mapping[str, Collection[str] | None]) -> None:
        document: dict[str, Any] = json.loads(resources.files(__package__).joinpath(file_name).read_bytes())
        jsonschema.Draft7Validator.check_schema(document)
        self._what = what
        self._served = served
        self._properties: dict[str, dict[str, Any]] = document["properties"]
        self._validators = {key: jsonschema.Draft7Validator(schema) for key, schema in self._properties.items()}

    def supported(self) -> dict[str, str]:
        """Served keys and their meanings, without commas: Octavia's client joins lists with those."""
        return {key: str(self._properties[key]["description"]) for key in self._served}

    def validate(self, metadata: Mapping[str, object] | None) -> None:
        """Check metadata.

        Args:
            metadata: what the operator wrote; None and empty say nothing and are fine.

        Raises:
            UnsupportedOption: a key nobody knows, a value of the wrong type, or something not served yet.
        """
        if metadata is None:
            return
        if not isinstance(metadata, Mapping):
            raise self._refusal(f"metadata {_shown(metadata)}", "it is not an object of keys and values")
        for key, value in metadata.items():
            self._check(key, value)

    def _check(self, key: object, value: object) -> None:
        if not isinstance(key, str) or key not in self._properties:
            raise self._refusal(f"key {_shown(key)}", "there is no such key")
        error = next(self._validators[key].iter_errors(value), None)
        if error is not None:
            raise self._refusal(f"key '{key}' with the value {_shown(value)}", _reason(error))
        if key not in self._served:
            raise self._refusal(f"key '{key}'", NOT_YET)
        values = self._served[key]
        if values is not None and value not in values:
            raise self._refusal(f"key '{key}' with the value {_shown(value)}", NOT_YET)

    def _refusal(self, wanted: str, happened: str) -> UnsupportedOption:
        known = (f"{key} ({' or '.join(values)})" if values else key for key, values in self._served.items())
        return UnsupportedOption(
            f"use the {self._what} {wanted}",
            happened,
            f"Remove it or use what is served: {', '.join(known)}.",
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reason(error: jsonschema.ValidationError) -> str:
    """The validator's complaint as words; its own message would repeat the whole value."""
    wanted: Any = error.validator_value
    if error.validator == "type":
        return f"it must be of type {wanted}"
    if error.validator == "enum":
        return f"it must be one of {', '.join(map(str, wanted))}"
    return "it must not be empty"
