# SPDX-License-Identifier: Apache-2.0
"""Create the tables of Heat from its models: prepare_heat.py URL. Runs in the environment of the services."""

import sys

import sqlalchemy as sa
from heat.db import models

engine = sa.create_engine(sys.argv[1])
models.BASE.metadata.create_all(engine)
engine.dispose()
