# SPDX-License-Identifier: Apache-2.0
"""The HAProxy template, loaded once: one macro for each kind of section.

Invariant: the template prints only values of `quoting`.
"""

from __future__ import annotations

from typing import Any

import jinja2

from amphora_driver.render import quoting


class _Environment(jinja2.Environment):
    # For a missing attribute, Jinja2's own `getattr` would read the item of a mapping with that name. The built-in
    # `getattr` raises an error, so that a wrong name is detected.
    getattr = staticmethod(getattr)  # type: ignore[assignment]


_ENVIRONMENT = _Environment(
    loader=jinja2.PackageLoader("amphora_agent", "templates"),
    undefined=jinja2.StrictUndefined,
    finalize=quoting.finalize,
    # HTML escaping would corrupt a configuration file. `finalize` refuses values that are not quoted.
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    auto_reload=False,
)
TEMPLATE: Any = _ENVIRONMENT.get_template("haproxy.cfg.j2").module
PREAMBLE: str = TEMPLATE.preamble()
