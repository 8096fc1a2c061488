# SPDX-License-Identifier: Apache-2.0
"""The harness's compare.py with two corrections.

The original ends a case at the first operation that one side does not have; this one continues. The original sends
constant bodies; this one inserts an increasing number into our bodies (see `adapter_agent`) before it sends them.

    side_by_side.py HARNESS-DIRECTORY ARGUMENTS-OF-COMPARE.PY
"""

import base64
import itertools
import sys

sys.path.insert(0, sys.argv.pop(1))

import compare

# Placeholders that `adapter_agent` writes.
_GENERATION, _LIMIT = b"4000000001", b"4000000002"
_generations = itertools.count(1)

_interleave = compare.Ctx.interleave


def interleave(*args, **kwargs):
    """Ignore sides without a result."""
    return {name: values for name, values in _interleave(*args, **kwargs).items() if values}


_request = compare.Https.request


def request(self, req, fresh=True):
    """Replace the placeholders in a body by the next generation and a different limit."""
    method, path, body, kind = req
    if path == "/v2/bundle" and body is not None:
        number = next(_generations)
        text = base64.b64decode(body).replace(_GENERATION, b"%d" % number).replace(_LIMIT, b"%d" % (1000 + number))
        body = base64.b64encode(text)
    return _request(self, (method, path, body, kind), fresh)


compare.Ctx.interleave = interleave
compare.Https.request = request
compare.main()
