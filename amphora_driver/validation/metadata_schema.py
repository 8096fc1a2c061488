# SPDX-License-Identifier: Apache-2.0
"""Validation of the metadata of flavors and availability zones by a JSON schema.

Invariant: the validation never changes the caller's object, and a refusal contains the key. The schema has all keys
that operators of Octavia know; `KeySupport` states which keys and values the deployment supports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jsonschema
import msgspec

from amphora_driver.errors import UnsupportedOption
from amphora_driver.validation.unsupported import NOT_SUPPORTED


class KeySupport(msgspec.Struct, frozen=True):
    """The support of a key by a deployment.

    Args:
        refusal: reason for the refusal of the key; None for a supported key.
        values: the supported values; None for all values of the schema.
        otherwise: reason for the refusal of other values.
    """

    refusal: str | None = None
    values: tuple[str, ...] | None = None
    otherwise: str = NOT_SUPPORTED


class MetadataSchema:
    """The schema of flavors or of availability zones, from a JSON schema (draft-07) in this directory."""

    def __init__(self, what: str, file_name: str) -> None:
        document: dict[str, Any] = json.loads(resources.files(__package__).joinpath(file_name).read_bytes())
        jsonschema.Draft7Validator.check_schema(document)
        self._what = what
        self.properties: dict[str, dict[str, Any]] = document["properties"]
        self._validators = {key: jsonschema.Draft7Validator(schema) for key, schema in self.properties.items()}

    def describe_supported(self, support: Mapping[str, KeySupport]) -> dict[str, str]:
        """Return the supported keys with descriptions without commas, with which Octavia's client joins lists."""
        found = {key: support.get(key, _UNRESTRICTED) for key in self.properties}
        return {key: self._describe(key, one) for key, one in found.items() if one.refusal is None}

    def validate(
        self, metadata: Mapping[str, object] | None, support: Mapping[str, KeySupport]
    ) -> Mapping[str, object]:
        """Check metadata and return it; for None, return empty metadata. `support` contains restricted keys."""
        if metadata is None:
            return {}
        if not isinstance(metadata, Mapping):
            raise self.refusal(f"metadata {_shorten(metadata)}", "it is not a JSON object", support)
        for key, value in metadata.items():
            self._check(key, value, support)
        return metadata

    def refusal(self, wanted: str, happened: str, support: Mapping[str, KeySupport]) -> UnsupportedOption:
        """Return the error, with the supported keys and values as the remedy."""
        served = ", ".join(
            f"{key} ({' or '.join(values)})" if (values := support.get(key, _UNRESTRICTED).values) is not None else key
            for key in self.describe_supported(support)
        )
        return UnsupportedOption(
            f"use the {self._what} {wanted}", happened, f"Remove it, or use a supported key and value: {served}."
        )

    def _describe(self, key: str, support: KeySupport) -> str:
        description = str(self.properties[key]["description"])
        return description if support.values is None else f"{description} Served: {' or '.join(support.values)}."

    def _check(self, key: object, value: object, support: Mapping[str, KeySupport]) -> None:
        if not isinstance(key, str) or key not in self.properties:
            raise self.refusal(f"key {_shorten(key)}", "this key is unknown", support)
        error = next(self._validators[key].iter_errors(value), None)
        if error is not None:
            raise self.refusal(f"key '{key}' with the value {_shorten(value)}", _reason(error), support)
        own = support.get(key, _UNRESTRICTED)
        if own.refusal is not None:
            raise self.refusal(f"key '{key}'", own.refusal, support)
        if own.values is not None and value not in own.values:
            raise self.refusal(f"key '{key}' with the value {_shorten(value)}", own.otherwise, support)


_UNRESTRICTED = KeySupport()


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _reason(error: jsonschema.ValidationError) -> str:
    # The error text of jsonschema contains the whole invalid value, so this function composes a short reason itself.
    wanted: Any = error.validator_value
    it = f"its item {_shorten(error.instance)}" if error.path else "it"
    rules = {
        "type": f"must be of type {wanted}",
        "minimum": f"must be {wanted} or more",
        "maximum": f"must be {wanted} or less",
        "minLength": "must not be empty",
        "minItems": "must not be empty",
        "maxLength": f"must not be longer than {wanted} characters",
        "uniqueItems": "must not contain a value twice",
    }
    if error.validator == "enum":
        return f"{it} must be one of {', '.join(map(str, wanted))}"
    if error.validator == "pattern":
        schema: Any = error.schema
        return f"{it} must be {schema['$comment']}"
    return f"{it} {rules.get(str(error.validator), 'does not match the schema')}"
