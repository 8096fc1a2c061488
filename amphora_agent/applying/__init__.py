# SPDX-License-Identifier: Apache-2.0
"""From a bundle that arrives to a bundle that is served and confirmed, and back if anything fails.

Invariant: here is decided in which order things are done and what is kept of them; how each one is done is known by the
rooms beside (`haproxy`, `keepalived`, `network`), which import nothing from here but the points that tests stop at.
"""
