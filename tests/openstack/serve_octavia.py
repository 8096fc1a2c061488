# SPDX-License-Identifier: Apache-2.0
"""Octavia's API for gunicorn: `serve_octavia:api()`. The variable OCTAVIA_CONF names its configuration file."""

import os

from octavia.api import app


def api():
    """The unchanged application, after the creation of its tables."""
    application = app.setup_app(argv=["octavia-api", "--config-file", os.environ["OCTAVIA_CONF"]])
    from sandbox import octavia_schema  # noqa: PLC0415 - the application reads the options first

    octavia_schema.ensure_schema()
    return application
