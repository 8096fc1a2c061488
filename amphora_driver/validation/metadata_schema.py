# SPDX-License-Identifier: Apache-2.0
"""Metadata that an operator attaches to flavors and availability zones, checked against a JSON schema.

Invariant: checking reads the caller's object and never changes it; a refusal names the key. The schema lists
everything Octavia's operators know; the terms say which keys, and which of their values, a deployment serves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jsonschema
import msgspec

from amphora_driver.errors import UnsupportedOption

NOT_YET = "this provider does not serve it yet"


class Terms(msgspec.Struct, frozen=True):
    """On what terms a key is served.

    Args:
        refusal: why it is not, in words; None if it is.
        values: the only values that are served; None stands for every value the schema takes.
        otherwise: why other values are not.
    """

    refusal: str | None = None
    values: tuple[str, ...] | None = None
    otherwise: str = NOT_YET


class Schema:
    """One kind of metadata.

    Args:
        what: its name in sentences ("flavor").
        file_name: a JSON schema (draft-07) beside this module.
    """

    def __init__(self, what: str, file_name: str) -> None:
        document: dict[str, Any] = json.loads(resources.files(__package__).joinpath(file_name).read_bytes())
        jsonschema.Draft7Validator.check_schema(document)
        self._what = what
        self.properties: dict[str, dict[str, Any]] = document["properties"]
        self._validators = {key: jsonschema.Draft7Validator(schema) for key, schema in self.properties.items()}

    def supported(self, terms: Mapping[str, Terms]) -> dict[str, str]:
        """Served keys and their meanings, without commas: Octavia's client joins lists with those."""
        return {
            key: self._meaning(key, terms.get(key, _FREE))
            for key in self.properties
            if terms.get(key, _FREE).refusal is None
        }

    def validate(self, metadata: Mapping[str, object] | None, terms: Mapping[str, Terms]) -> Mapping[str, object]:
        """Check metadata, and return it; an empty one where there is none.

        Args:
            metadata: what the operator wrote; None and empty say nothing and are fine.
            terms: for keys of which not everything is served.

        Raises:
            UnsupportedOption: a key nobody knows, a value of the wrong type or range, or something not served.
        """
        if metadata is None:
            return {}
        if not isinstance(metadata, Mapping):
            raise self.refusal(f"metadata {_shown(metadata)}", "it is not an object of keys and values", terms)
        for key, value in metadata.items():
            self._check(key, value, terms)
        return metadata

    def refusal(self, wanted: str, happened: str, terms: Mapping[str, Terms]) -> UnsupportedOption:
        """The error that says so, and what would be served instead."""
        served = ", ".join(
            f"{key} ({' or '.join(values)})" if (values := terms.get(key, _FREE).values) is not None else key
            for key in self.supported(terms)
        )
        return UnsupportedOption(
            f"use the {self._what} {wanted}", happened, f"Remove it or use what is served: {served}."
        )

    def _meaning(self, key: str, terms: Terms) -> str:
        meaning = str(self.properties[key]["description"])
        return meaning if terms.values is None else f"{meaning} Served: {' or '.join(terms.values)}."

    def _check(self, key: object, value: object, terms: Mapping[str, Terms]) -> None:
        if not isinstance(key, str) or key not in self.properties:
            raise self.refusal(f"key {_shown(key)}", "there is no such key", terms)
        error = next(self._validators[key].iter_errors(value), None)
        if error is not None:
            raise self.refusal(f"key '{key}' with the value {_shown(value)}", _reason(error), terms)
        mine = terms.get(key, _FREE)
        if mine.refusal is not None:
            raise self.refusal(f"key '{key}'", mine.refusal, terms)
        if mine.values is not None and value not in mine.values:
            raise self.refusal(f"key '{key}' with the value {_shown(value)}", mine.otherwise, terms)


_FREE = Terms()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reason(error: jsonschema.ValidationError) -> str:
    """The validator's complaint as words; its own message would repeat the whole value."""
    wanted: Any = error.validator_value
    it = f"its item {_shown(error.instance)}" if error.path else "it"
    rules = {
        "type": f"must be of type {wanted}",
        "minimum": f"must be {wanted} or more",
        "maximum": f"must be {wanted} or less",
        "minLength": "must not be empty",
        "minItems": "must not be empty",
        "maxLength": f"must not be longer than {wanted} characters",
        "uniqueItems": "must not name anything twice",
    }
    if error.validator == "enum":
        return f"{it} must be one of {', '.join(map(str, wanted))}"
    if error.validator == "pattern":
        schema: Any = error.schema
        return f"{it} must be {schema['$comment']}"
    return f"{it} {rules.get(str(error.validator), 'is not what the schema asks for')}"
