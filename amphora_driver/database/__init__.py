# SPDX-License-Identifier: Apache-2.0
"""The database below the store: engine, tables, schema versions, encryption of secrets at rest."""
