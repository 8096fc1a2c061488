# SPDX-License-Identifier: Apache-2.0
"""Enumerations of Octavia's v2 API.

Invariant: every value is exactly the text in the API.
Source: Octavia API reference v2 and `octavia_lib.common.constants`.
"""

from enum import Enum


class StringEnum(str, Enum):
    """A string enumeration that formats as its value on every supported Python."""

    def __str__(self) -> str:
        return str(self.value)


class Kind(StringEnum):
    """The object kinds of a load balancer; values are the keys of the status interface."""

    LOAD_BALANCER = "loadbalancers"
    LISTENER = "listeners"
    POOL = "pools"
    MEMBER = "members"
    HEALTH_MONITOR = "healthmonitors"
    L7POLICY = "l7policies"
    L7RULE = "l7rules"


class ListenerProtocol(StringEnum):
    """Protocols between clients and a listener."""

    TCP = "TCP"
    HTTP = "HTTP"
    HTTPS = "HTTPS"
    TERMINATED_HTTPS = "TERMINATED_HTTPS"
    UDP = "UDP"
    SCTP = "SCTP"
    PROMETHEUS = "PROMETHEUS"


class PoolProtocol(StringEnum):
    """Protocols between a pool and its members."""

    TCP = "TCP"
    HTTP = "HTTP"
    HTTPS = "HTTPS"
    PROXY = "PROXY"
    PROXYV2 = "PROXYV2"
    UDP = "UDP"
    SCTP = "SCTP"


class Algorithm(StringEnum):
    """Load balancing algorithms of a pool."""

    ROUND_ROBIN = "ROUND_ROBIN"
    LEAST_CONNECTIONS = "LEAST_CONNECTIONS"
    SOURCE_IP = "SOURCE_IP"
    SOURCE_IP_PORT = "SOURCE_IP_PORT"


class MonitorType(StringEnum):
    """Types of health checks."""

    HTTP = "HTTP"
    HTTPS = "HTTPS"
    PING = "PING"
    TCP = "TCP"
    TLS_HELLO = "TLS-HELLO"
    UDP_CONNECT = "UDP-CONNECT"
    SCTP = "SCTP"


class PersistenceType(StringEnum):
    """Types of session persistence."""

    SOURCE_IP = "SOURCE_IP"
    HTTP_COOKIE = "HTTP_COOKIE"
    APP_COOKIE = "APP_COOKIE"


class ClientAuthentication(StringEnum):
    """Client authentication modes of a TLS listener."""

    NONE = "NONE"
    OPTIONAL = "OPTIONAL"
    MANDATORY = "MANDATORY"


class L7Action(StringEnum):
    """Actions of an L7 policy on a matching request."""

    REJECT = "REJECT"
    REDIRECT_TO_URL = "REDIRECT_TO_URL"
    REDIRECT_TO_POOL = "REDIRECT_TO_POOL"
    REDIRECT_PREFIX = "REDIRECT_PREFIX"


class L7RuleType(StringEnum):
    """Attributes of a request that an L7 rule compares."""

    HOST_NAME = "HOST_NAME"
    PATH = "PATH"
    FILE_TYPE = "FILE_TYPE"
    HEADER = "HEADER"
    COOKIE = "COOKIE"
    SSL_CONN_HAS_CERT = "SSL_CONN_HAS_CERT"
    SSL_VERIFY_RESULT = "SSL_VERIFY_RESULT"
    SSL_DN_FIELD = "SSL_DN_FIELD"


class L7Compare(StringEnum):
    """Comparisons of an L7 rule."""

    REGEX = "REGEX"
    STARTS_WITH = "STARTS_WITH"
    ENDS_WITH = "ENDS_WITH"
    CONTAINS = "CONTAINS"
    EQUAL_TO = "EQUAL_TO"


class Provisioning(StringEnum):
    """Provisioning statuses that a provider reports."""

    ACTIVE = "ACTIVE"
    DELETED = "DELETED"
    ERROR = "ERROR"


class Operating(StringEnum):
    """Operating statuses that a provider reports."""

    ONLINE = "ONLINE"
    OFFLINE = "OFFLINE"
    DEGRADED = "DEGRADED"
    ERROR = "ERROR"
    DRAINING = "DRAINING"
    NO_MONITOR = "NO_MONITOR"


class Topology(StringEnum):
    """Number and roles of the amphorae of a load balancer."""

    SINGLE = "SINGLE"
    ACTIVE_STANDBY = "ACTIVE_STANDBY"
