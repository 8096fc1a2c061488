# SPDX-License-Identifier: Apache-2.0
"""A program with the parts of an Octavia worker: amphora driver, client, templates and health manager.

It replaces only two parts of Octavia: the source of certificates, and the types of its API. No worker needs these
types, and their creation takes five seconds. There is no database. Standard input has one request in each line, and
standard output has one answer in each line, both JSON. The answer to a failed call has the name of the exception.

    python octavia_worker.py '{"options": {...}, "secrets": {...}}'
"""

import contextlib
import json
import logging
import re
import select
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)


class NoTypes(MetaPathFinder, Loader):
    """Finds modules in which every name exists as a stand-in."""

    def find_spec(self, name, _path, _target=None):
        return ModuleSpec(name, self) if name.startswith("octavia.api.v2.types.") else None

    def create_module(self, spec):
        made = ModuleType(spec.name)
        made.__getattr__ = lambda _: object
        return made

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, NoTypes())

from octavia.amphorae.backends.agent import agent_jinja_cfg  # noqa: E402
from octavia.amphorae.drivers.haproxy import rest_api_driver  # noqa: E402
from octavia.amphorae.drivers.health import heartbeat_udp  # noqa: E402
from octavia.common import data_models as dm  # noqa: E402
from octavia.network import data_models as network  # noqa: E402
from oslo_config import cfg  # noqa: E402
from oslo_log import log  # noqa: E402

TLS = {"tls_versions": ["TLSv1.2", "TLSv1.3"]}
STANDING = {"enabled": True, "provisioning_status": "ACTIVE", "operating_status": "ONLINE", "project_id": "project"}


class Certificate:
    """The object that a certificate manager returns."""

    def __init__(self, parts):
        self.parts = parts

    def get_certificate(self):
        return self.parts["certificate"]

    def get_private_key(self):
        return self.parts["key"]

    def get_private_key_passphrase(self):
        return None

    def get_intermediates(self):
        return None


class Secrets:
    """Certificates and CAs by reference."""

    def __init__(self, secrets):
        self.secrets = secrets

    def get_cert(self, _context, reference, **_):
        return Certificate(self.secrets[reference])

    def get_secret(self, _context, reference):
        return self.secrets[reference]


class Worker:
    def __init__(self, options, secrets):
        log.register_options(cfg.CONF)
        cfg.CONF([], project="octavia", default_config_files=[])
        for name, value in options.items():
            group, option = name.split(".")
            cfg.CONF.set_override(option, value, group)
        cfg.CONF.set_override("cert_manager", "noop_cert_manager", "certificates")
        self.driver = rest_api_driver.HaproxyAmphoraLoadBalancerDriver()
        self.driver.cert_manager = Secrets(secrets)
        self.amphora = None
        self.getters = []
        self.client = self.driver.clients["1.0"]

    # -- data model ----------------------------------------------------------------------------------------------------

    def load_balancer(self, wanted):
        amphorae = [self.amphora, *(dm.Amphora(status="ALLOCATED", **each) for each in wanted.get("partners", ()))]
        made = dm.LoadBalancer(
            id=wanted["id"],
            name="lb",
            topology="ACTIVE_STANDBY" if len(amphorae) > 1 else "SINGLE",
            vip=dm.Vip(ip_address=wanted["vip"]),
            additional_vips=[dm.AdditionalVip(ip_address=each) for each in wanted.get("additional_vips", ())],
            amphorae=amphorae,
            vrrp_group=dm.VRRPGroup(vrrp_group_name="lb", vrrp_auth_type="PASS", vrrp_auth_pass="x", advert_int=1),
            **STANDING,
        )
        pools = {each["id"]: self.pool(made, each) for each in wanted["pools"]}
        made.pools = list(pools.values())
        made.listeners = [self.listener(made, each, pools) for each in wanted["listeners"]]
        return made

    def pool(self, load_balancer, wanted):
        wanted = {**TLS, **wanted} if wanted.get("tls_enabled") else dict(wanted)
        members = [
            dm.Member(**{**STANDING, "protocol_port": 80, "weight": 1, "backup": False, **each})
            for each in wanted.pop("members", ())
        ]
        monitor, persistence = wanted.pop("monitor", None), wanted.pop("persistence", None)
        if wanted.get("tls_enabled"):
            wanted.setdefault("tls_ciphers", cfg.CONF.api_settings.default_pool_ciphers)
        made = dm.Pool(load_balancer=load_balancer, lb_algorithm="ROUND_ROBIN", members=members, **STANDING, **wanted)
        for each in members:
            each.pool = made
        if monitor is not None:
            defaults = {"id": "monitor", "delay": 1, "timeout": 1, "fall_threshold": 1, "rise_threshold": 1}
            made.health_monitor = dm.HealthMonitor(pool=made, **{**STANDING, **defaults, **monitor})
        if persistence is not None:
            made.session_persistence = dm.SessionPersistence(pool=made, **persistence)
        return made

    def listener(self, load_balancer, wanted, pools):
        wanted = dict(wanted)
        pool = pools.get(wanted.pop("pool", None))
        policies = wanted.pop("policies", [])
        sni = [dm.SNI(tls_container_id=each) for each in wanted.pop("sni", ())]
        defaults = {
            "connection_limit": -1,
            "timeout_client_data": 50000,
            "timeout_member_connect": 5000,
            "timeout_member_data": 50000,
            "timeout_tcp_inspect": 0,
            "insert_headers": {},
            "client_authentication": "NONE",
            "tls_ciphers": cfg.CONF.api_settings.default_listener_ciphers,
            **TLS,
        }
        made = dm.Listener(
            load_balancer=load_balancer,
            default_pool=pool,
            default_pool_id=None if pool is None else pool.id,
            pools=[] if pool is None else [pool],
            sni_containers=sni,
            **{**STANDING, **defaults, **wanted},
        )
        made.l7policies = [self.policy(made, position, each, pools) for position, each in enumerate(policies, 1)]
        return made

    @staticmethod
    def policy(listener, position, wanted, pools):
        wanted = dict(wanted)
        rules = wanted.pop("rules")
        target = pools.get(wanted.pop("to_pool", None))
        if target is not None:
            listener.pools.append(target)
            wanted.update(redirect_pool=target, redirect_pool_id=target.id)
        made = dm.L7Policy(listener=listener, position=position, **STANDING, **wanted)
        made.l7rules = [
            dm.L7Rule(id=f"{wanted['id']}-{number}", l7policy=made, **{**STANDING, **each})
            for number, each in enumerate(rules)
        ]
        return made

    @staticmethod
    def subnet(wanted):
        routes = [network.HostRoute(**each) for each in wanted.get("host_routes", ())]
        return network.Subnet(cidr=wanted["cidr"], gateway_ip=wanted.get("gateway"), host_routes=routes)

    # -- requests ------------------------------------------------------------------------------------------------------

    def drive(self, amphora):
        self.amphora = dm.Amphora(status="ALLOCATED", **amphora)

    def check(self):
        self.amphora.api_version = None
        self.driver.check(self.amphora)
        return self.amphora.api_version

    def call(self, method, *arguments):
        """Call any method of the client."""
        answer = getattr(self.client, method)(self.amphora, *arguments)
        return {"status": answer.status_code, "body": answer.json()} if hasattr(answer, "status_code") else answer

    def fetch(self, path):
        """Send a request for which the client has no method."""
        answer = self.client.get(self.amphora, path)
        return {"status": answer.status_code, "text": answer.text, "etag": answer.headers.get("ETag")}

    def plug_vip(self, load_balancer, port, subnet, additional):
        made = self.load_balancer(load_balancer)
        plugged = network.Port(id="vrrp", mac_address=port["mac"], network=network.Network(mtu=port["mtu"]))
        found = [
            network.AdditionalVipData(ip_address=each["ip_address"], subnet=self.subnet(each)) for each in additional
        ]
        self.driver.post_vip_plug(self.amphora, made, None, plugged, self.subnet(subnet), found)

    def plug_network(self, port, fixed):
        ips = [network.FixedIP(ip_address=each["ip_address"], subnet=self.subnet(each)) for each in fixed]
        made = network.Port(id="p", mac_address=port["mac"], network=network.Network(mtu=port["mtu"]), fixed_ips=ips)
        self.driver.post_network_plug(self.amphora, made, {})

    def update(self, load_balancer):
        """Perform the whole update; return the amphora's answer to the last reload.

        Octavia's own answer does not contain it.
        """
        answers = []
        session = self.client.session
        put = session.put
        session.put = lambda **given: answers.append(put(**given)) or answers[-1]
        try:
            self.driver.update_amphora_listeners(self.load_balancer(load_balancer), self.amphora)
        finally:
            session.put = put
        return answers[-1].json()

    def delete(self, load_balancer, listener):
        made = self.load_balancer(load_balancer)
        self.driver.delete(next(each for each in made.listeners if each.id == listener))

    def vrrp(self, action, load_balancer, subnet):
        made = self.load_balancer(load_balancer)
        if action == "upload":
            nets = {"vip_subnet": self.subnet(subnet).to_dict(recurse=True), "additional_vip_data": []}
            self.driver.update_vrrp_conf(made, {self.amphora.id: nets}, self.amphora)
        elif action == "start":
            self.driver.start_vrrp_service(self.amphora)
        elif action == "reload":
            self.client.reload_vrrp(self.amphora)
        else:
            self.driver.stop_vrrp_service_on_amphora(self.amphora)

    def interface(self, address):
        return self.driver.get_interface_from_ip(self.amphora, address)

    def rules(self, address, rules):
        self.driver.set_interface_rules(self.amphora, address, rules)

    def rotate(self, pem):
        self.driver.upload_cert_amp(self.amphora, pem.encode())

    def configure(self, topology, **options):
        for option, value in options.items():
            cfg.CONF.set_override(option, value, "health_manager")
        text = agent_jinja_cfg.AgentJinjaTemplater().build_agent_config(self.amphora.id, topology)
        self.driver.update_amphora_agent_config(self.amphora, text)

    def listen(self, key, address, *ports):
        """Listen as health managers on each port. They need a database only to process heartbeats."""
        while self.getters:
            self.getters.pop().sock.close()
        for port in ports:
            getter = heartbeat_udp.UDPStatusGetter.__new__(heartbeat_udp.UDPStatusGetter)
            getter.sock = None
            getter.update(key, address, port)
            self.getters.append(getter)

    def heartbeats(self, count):
        """Return the next decoded heartbeats, each with the number of its receiving health manager."""
        found = []
        while len(found) < count:
            ready, _, _ = select.select([each.sock for each in self.getters], [], [], 15)
            if not ready:
                raise TimeoutError("no heartbeat")
            found += [(n, each.dorecv()[0]) for n, each in enumerate(self.getters) if each.sock in ready]
        return found

    def requests(self):
        """Return every call of the client, as method and path, without sending it."""
        client = rest_api_driver.AmphoraAPIClient1_0()
        asked = []
        names = [name for name in vars(type(client)) if re.match(r"[a-z]", name)] + list(vars(client))
        skipped = {"get", "put", "post", "delete", "head", "session", "ssl_adapter", "request"}
        for verb in ("get", "put", "post", "delete"):
            setattr(client, verb, lambda _amp, path, *_a, verb=verb, **_k: asked.append((verb.upper(), path)))
        calls = {}
        for name in sorted(set(names) - skipped):
            before = len(asked)
            for arguments in range(4):
                with contextlib.suppress(Exception):  # too few arguments, or a malformed answer
                    getattr(client, name)(self.amphora, *["x"] * arguments)
                if len(asked) > before:
                    calls[name] = asked[before]
                    break
        return calls


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = Worker(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": getattr(worker, request["do"])(*request["arguments"], **request["options"])}
        except Exception as error:  # noqa: BLE001 (the test judges any exception)
            answer = {"error": type(error).__name__, "text": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
