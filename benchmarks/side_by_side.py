# SPDX-License-Identifier: Apache-2.0
"""The harness's compare.py, which otherwise gives up a case at the first thing one side does not have.

side_by_side.py FOLDER-OF-THE-HARNESS ARGUMENTS-OF-COMPARE.PY
"""

import sys

sys.path.insert(0, sys.argv.pop(1))

import compare

_interleave = compare.Ctx.interleave


def interleave(*args, **kwargs):
    """Without the sides that have no result at all."""
    return {name: values for name, values in _interleave(*args, **kwargs).items() if values}


compare.Ctx.interleave = interleave
compare.main()
