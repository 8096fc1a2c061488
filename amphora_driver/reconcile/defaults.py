# SPDX-License-Identifier: Apache-2.0
"""Values from the configuration: defaults of load balancers, and settings of agents.

A default is the value of a setting that a load balancer's profile does not set.

Invariant: every push reads the configuration, so a changed option applies to a load balancer with its next change.
Values of a profile do not change.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from oslo_config.cfg import ConfigOpts

from amphora_agent.log_settings import ENCRYPTED
from amphora_driver.errors import ConfigurationError, UnsupportedOption
from amphora_driver.model.loadbalancer import LoadBalancer
from amphora_driver.render.agent_settings import (
    AgentSettings,
    LogSettings,
    LogTarget,
    render_agent_settings,
    render_log_settings,
)
from amphora_driver.render.effective_defaults import Defaults
from amphora_driver.secret import Secret
from amphora_driver.validation import flavors, log_format


def validate_defaults(conf: ConfigOpts) -> None:
    """Validate `[amp_haproxy]` like a flavor, and the settings of agents: they affect every load balancer.

    Raises:
        ConfigurationError: an option is invalid; the message names it.
    """
    said = {name: value for name, value in dict(conf.amp_haproxy).items() if value is not None}
    try:
        flavors.SCHEMA.validate(said, {})
        log_format.check_log_format(said.get("log_format", ""))
    except UnsupportedOption as error:
        raise ConfigurationError("use the options of [amp_haproxy]", str(error).rstrip(".")) from error
    agent_settings(conf)
    log_defaults(conf)


def agent_settings(conf: ConfigOpts) -> AgentSettings:
    """Return the heartbeat settings and intervals of all agents.

    Raises:
        ConfigurationError: a target is not an IP address with a port.
    """
    try:
        return render_agent_settings(conf.amp_health.targets, conf.amp_health.interval, conf.amp_drift.agent_interval)
    except ValueError as error:
        remedy = "Write an IP address and a port, for example 192.0.2.10:9879 or [2001:db8::10]:9879."
        raise ConfigurationError("use the option [amp_health] targets", str(error), remedy) from error


def log_defaults(conf: ConfigOpts) -> LogSettings:
    """Return the log targets of `[amp_logs]`, with the content of its files.

    Raises:
        ConfigurationError: a target is invalid, a file cannot be read, or a file has no usable certificate.
    """
    options = conf.amp_logs
    authorities = "" if options.ca_certificate is None else _read_authorities(options.ca_certificate)
    given = "" if options.authorization_file is None else _read(options.authorization_file, "authorization_file")
    authorization = Secret(given.strip().encode())
    path = options.client_certificate
    certificate = Secret(b"") if path is None else _read_client_certificate(path)

    def target(url: str) -> LogTarget:
        scheme = url.partition(":")[0]
        shown = certificate if scheme in ENCRYPTED else Secret(b"")
        return LogTarget(url, authorization if scheme == "https" else Secret(b""), shown)

    try:
        admin, tenant = ([target(url) for url in urls] for urls in (options.admin_targets, options.tenant_targets))
        return render_log_settings(admin, tenant, authorities, options.queue_bytes)
    except ValueError as error:
        remedy = "Write for example udp://192.0.2.9:514 or tls://[2001:db8::9]:6514, and set ca_certificate."
        raise ConfigurationError("use the options of [amp_logs]", str(error), remedy) from error


def log_files(conf: ConfigOpts) -> list[str]:
    """Return the files of `[amp_logs]`, whose content `log_defaults` reads."""
    options = conf.amp_logs
    return [one for one in (options.ca_certificate, options.authorization_file, options.client_certificate) if one]


def log_settings(defaults: LogSettings, load_balancer: LoadBalancer | None) -> LogSettings:
    """Return the log settings of an amphora; a warm spare has no load balancer.

    Targets of a flavor replace the configured ones, and get neither authorization nor client certificate. A warm spare
    has no targets of flows: the flavor of the load balancer that takes it may name others, and the first flows can
    precede the next settings.

    Raises:
        ConfigurationError: a target of the flavor needs a CA certificate, which the deployment has not any more.
    """
    if load_balancer is None:
        return msgspec.structs.replace(defaults, tenant=())
    profile = load_balancer.profile
    named = {"admin": profile.admin_log_targets, "tenant": profile.tenant_log_targets}
    chosen = {
        kind: getattr(defaults, kind) if urls is None else [LogTarget(url) for url in urls]
        for kind, urls in named.items()
    }
    try:
        return render_log_settings(
            **chosen,
            authorities=defaults.authorities,
            queue_bytes=defaults.queue_bytes,
            project_id=load_balancer.project_id,
            load_balancer_id=load_balancer.id,
        )
    except ValueError as error:
        remedy = "Set [amp_logs] ca_certificate, or resize the load balancer to a flavor with other targets."
        raise ConfigurationError(f"use the log targets of {load_balancer.id}", str(error), remedy) from error


def _read_authorities(path: str) -> str:
    """Return the certificates of a file in PEM.

    Other content, for example a private key, reaches no amphora.
    """
    try:
        found = x509.load_pem_x509_certificates(_read(path, "ca_certificate").encode())
    except ValueError as error:
        happened = f"the file has no CA certificate in PEM, or an invalid one ({error})"
        raise ConfigurationError(f"read {path} ([amp_logs] ca_certificate)", happened, "Correct the option.") from error
    return "".join(one.public_bytes(Encoding.PEM).decode() for one in found)


def _read_client_certificate(path: str) -> Secret:
    """Return the certificate of amphorae, its chain and its key in PEM, in this order."""
    content = _read(path, "client_certificate").encode()
    try:
        first, *chain = x509.load_pem_x509_certificates(content)
        key = load_pem_private_key(content, password=None)
        happened = "" if key.public_key() == first.public_key() else "the key is not that of the first certificate"
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The message does not quote the error, because its text could contain a part of the private key.
        happened = "the file has no certificate with a private key in PEM, or its key has a passphrase"
    if happened:
        remedy = "Write the certificate, its chain, and the key of the certificate."
        raise ConfigurationError(f"read {path} ([amp_logs] client_certificate)", happened, remedy)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Secret(b"".join(one.public_bytes(Encoding.PEM) for one in (first, *chain)) + private)


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        happened = getattr(error, "strerror", None) or "the file has characters that are not ASCII"
        raise ConfigurationError(f"read {path} ([amp_logs] {option})", happened, "Correct the option.") from error


def rendering_defaults(conf: ConfigOpts) -> Defaults:
    """Return the defaults of `[amp_haproxy]`; an unset option keeps the default of the rendering."""
    said = {name: conf.amp_haproxy[name] for name in Defaults.__struct_fields__}
    return Defaults(**{name: value for name, value in said.items() if value is not None})


def advert_interval(tree: LoadBalancer, conf: ConfigOpts) -> float:
    """Return the seconds between two VRRP advertisements of the VIP holder."""
    return float(tree.profile.vrrp_advert_interval or conf.amp_vrrp.advert_interval)


def with_process_limits(tree: LoadBalancer, conf: ConfigOpts) -> LoadBalancer:
    """Return the load balancer with the limits of its HAProxy processes filled in."""
    profile = msgspec.structs.replace(
        tree.profile,
        process_connection_limit=tree.profile.process_connection_limit or conf.amp_haproxy.process_connection_limit,
        process_threads=tree.profile.process_threads or conf.amp_haproxy.process_threads,
    )
    return msgspec.structs.replace(tree, profile=profile)
