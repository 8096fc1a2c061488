# SPDX-License-Identifier: Apache-2.0
"""The harness's compare.py, with two repairs.

It gives up a case at the first thing one side does not have; here it goes on. And it sends bodies that never change,
while ours carry a number that grows (see `adapter_agent`): the number is put in on the way, in the harness's own time.

side_by_side.py FOLDER-OF-THE-HARNESS ARGUMENTS-OF-COMPARE.PY
"""

import base64
import itertools
import sys

sys.path.insert(0, sys.argv.pop(1))

import compare

# What `adapter_agent` writes where a number is to be.
_GENERATION, _LIMIT = b"4000000001", b"4000000002"
_generations = itertools.count(1)

_interleave = compare.Ctx.interleave


def interleave(*args, **kwargs):
    """Without the sides that have no result at all."""
    return {name: values for name, values in _interleave(*args, **kwargs).items() if values}


_request = compare.Https.request


def request(self, req, fresh=True):
    """With the next generation, and another limit than the last time, where the body wants them."""
    method, path, body, kind = req
    if path == "/v2/bundle" and body is not None:
        number = next(_generations)
        text = base64.b64decode(body).replace(_GENERATION, b"%d" % number).replace(_LIMIT, b"%d" % (1000 + number))
        body = base64.b64encode(text)
    return _request(self, (method, path, body, kind), fresh)


compare.Ctx.interleave = interleave
compare.Https.request = request
compare.main()
