# SPDX-License-Identifier: Apache-2.0
"""Creates Octavia's tables in SQLite or any other database.

Invariant: the tables follow from Octavia's models, and the rows of lookup tables from Octavia's constants. Octavia's
migrations are not usable, because they change constraints with statements that only MySQL supports.
"""

from __future__ import annotations

from octavia.common import constants
from octavia.db import api, base_models, models

_VERSION = 1
LOOKUPS = (
    (models.ProvisioningStatus, constants.SUPPORTED_PROVISIONING_STATUSES),
    (models.OperatingStatus, constants.SUPPORTED_OPERATING_STATUSES),
    (models.Protocol, constants.SUPPORTED_PROTOCOLS),
    (models.Algorithm, constants.SUPPORTED_LB_ALGORITHMS),
    (models.AmphoraRoles, constants.SUPPORTED_AMPHORA_ROLES),
    (models.LBTopology, constants.SUPPORTED_LB_TOPOLOGIES),
    (models.SessionPersistenceType, constants.SUPPORTED_SP_TYPES),
    (models.HealthMonitorType, constants.SUPPORTED_HEALTH_MONITOR_TYPES),
    (models.VRRPAuthMethod, constants.SUPPORTED_VRRP_AUTH),
    (models.L7RuleType, constants.SUPPORTED_L7RULE_TYPES),
    (models.L7RuleCompareType, constants.SUPPORTED_L7RULE_COMPARE_TYPES),
    (models.L7PolicyAction, constants.SUPPORTED_L7POLICY_ACTIONS),
    (models.ClientAuthenticationMode, constants.SUPPORTED_CLIENT_AUTH_MODES),
)


def ensure_schema() -> None:
    """Create the tables and the lookup rows if they are missing."""
    engine = api.get_engine()
    file = engine.dialect.name == "sqlite"
    with engine.connect() as connection:
        if file and connection.exec_driver_sql("PRAGMA user_version").scalar() == _VERSION:
            return
    base_models.BASE.metadata.create_all(engine)
    session = api.get_session()
    with session.begin():
        for model, names in LOOKUPS:
            for name in names:
                session.merge(model(name=name))
        _add_placeholders(session)
    with engine.begin() as connection:
        if file:
            connection.exec_driver_sql(f"PRAGMA user_version = {_VERSION}")


def _add_placeholders(session: object) -> None:
    """Add the rows that deleted load balancers refer to as their flavor and availability zone."""
    nil, gone = constants.NIL_UUID, "DELETED-PLACEHOLDER"
    add = session.merge  # type: ignore[attr-defined]
    provider = {"id": nil, "name": gone, "provider_name": constants.DELETED}
    add(models.FlavorProfile(**provider, flavor_data="{}"))
    add(models.AvailabilityZoneProfile(**provider, availability_zone_data="{}"))
    session.flush()  # type: ignore[attr-defined]
    add(models.Flavor(id=nil, name=gone, flavor_profile_id=nil, enabled=False))
    add(models.AvailabilityZone(name=nil, availability_zone_profile_id=nil, enabled=False))
