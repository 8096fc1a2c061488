# SPDX-License-Identifier: Apache-2.0
"""Application credentials and policies from files, never from the command line.

The arguments of a process are visible to all users of its host, and a shell keeps them in its history.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import Any

import msgspec

from amphora_cluster import policy
from amphora_cluster.credential import ApplicationCredential
from amphora_cluster.policy import PolicySpec
from amphora_driver.errors import ConfigurationError
from amphora_driver.secret import Secret

_READ = "read the application credential"
_FORM = "Create it with: openstack application credential create NAME -f json."


class _File(msgspec.Struct):
    """The output of `openstack application credential create -f json`; other keys are ignored."""

    id: str
    secret: str
    project_id: str | None = None


def read_credential(path: str) -> tuple[ApplicationCredential, str | None]:
    """Return the application credential of a JSON file, and the project if the file names it.

    Args:
        path: of the file; `-` for standard input.

    Raises:
        ConfigurationError: the file does not exist, is readable by other users, or has another form.
    """
    try:
        if path == "-":
            content = sys.stdin.buffer.read()
        else:
            if Path(path).stat().st_mode & stat.S_IRWXO:
                happened = f"other users have access to {path}"
                raise ConfigurationError(_READ, happened, f"Run chmod o-rwx {path}.")
            content = Path(path).read_bytes()
        found = msgspec.json.decode(content, type=_File)
    except OSError as error:
        raise ConfigurationError(_READ, f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        # `from None` drops the decoder's error, whose traceback would show the content of the file.
        raise ConfigurationError(_READ, f"{path} is not JSON with the keys id and secret", _FORM) from None
    return ApplicationCredential(id=found.id, secret=Secret(found.secret.encode())), found.project_id


def read_policy(path: str) -> PolicySpec:
    """Return the policy of a JSON or YAML file.

    Raises:
        ConfigurationError: the file does not exist, or is neither JSON nor YAML.
        RequestError: naming the property that is wrong.
    """
    import yaml  # noqa: PLC0415 - a part of oslo.config, which few commands need

    try:
        document: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError("read the policy", f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError("read the policy", f"{path} is neither JSON nor YAML: {error}") from error
    return policy.from_mapping(document)
