# SPDX-License-Identifier: Apache-2.0
"""The boot files of an amphora as one document in Nova's user data.

Invariant: no I/O. `amphora_agent/config_drive.py` reads the document in the image. Nova limits only the size
of the user data. For injected files, Nova has a quota of five by default, and its newer API versions refuse them.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import msgspec

from amphora_driver.errors import ComputeError
from amphora_driver.secret import Secret

KEY = "amphora_files"
# Nova accepts at most this number of characters of user data, counted after the encoding as base64.
LIMIT = 65535


def build_user_data(files: Mapping[str, bytes], wanted: str) -> Secret:
    """Return the document with these files, encoded as base64.

    Args:
        files: the contents by name in ``/etc/amphora-agent``.
        wanted: the attempted operation, as an infinitive.

    Raises:
        ComputeError: a file is not text, or the document is longer than Nova's limit.
    """
    try:
        texts = {name: content.decode() for name, content in sorted(files.items())}
    except UnicodeDecodeError:
        # The new error does not contain the decoder's error, which would quote the file. The file may contain a private
        # key.
        raise ComputeError(wanted, "a boot file is not text in UTF-8", final=True) from None
    encoded = base64.b64encode(msgspec.json.encode({KEY: texts}))
    if len(encoded) > LIMIT:
        happened = f"the boot files have {len(encoded)} characters as base64, and Nova accepts {LIMIT}"
        raise ComputeError(wanted, happened, "Use shorter certificate chains in [amp_certificates].", final=True)
    return Secret(encoded)
