# SPDX-License-Identifier: Apache-2.0
"""A load balancer with as much of Octavia's model as possible, created in two ways.

One is created in steps, the other by a single request. Both results are the same, every feature works beside all
others, and both are deleted completely.
"""

import http.client
import json
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import authorities
import pytest
import sqlalchemy as sa
import whole_model
from agreement import assert_agreed
from cloud import Cloud
from echo import answering

from amphora_driver.database import tables
from amphora_driver.host import namespaces
from amphora_driver.store import desired_objects
from sandbox import topology

pytestmark = pytest.mark.root
BOTH = pytest.mark.parametrize("name", [pytest.param("steps", marks=pytest.mark.extended), "post"])
OFF = {"app-4", "off", "asleep", "asleep/PATH", "sleepless/PATH"}
"""The disabled objects."""


class LoadBalancers(dict):
    """The two load balancers by name, each created at its first use."""

    def __init__(self, cloud):
        super().__init__()
        self._cloud = cloud

    def __missing__(self, name):
        make = {"post": whole_model.in_one_request, "steps": whole_model.step_by_step}[name]
        self[name] = make(self._cloud, name)
        return self[name]


@pytest.fixture(scope="module")
def place(settings, connection, database, tmp_path_factory):
    """Echo members, and the load balancers in front of them by name."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "member.pem").write_text(authorities.ONE.pem)
    (folder / "authorities.pem").write_text(authorities.AUTHORITIES)
    authorities.keep_all(settings)
    cloud = Cloud(settings, connection, database)
    sealed = {"certificate": folder / "member.pem", "clients": folder / "authorities.pem"}
    with ExitStack() as stack:
        for host in ("member1", "member2"):
            stack.enter_context(answering(settings, host, whole_model.ECHO))
        stack.enter_context(answering(settings, "member3", whole_model.SEALED, **sealed))
        yield cloud, LoadBalancers(cloud)
        cloud.clean()


def tree_of(cloud, balancer):
    return cloud.database.read(lambda connection: desired_objects.load_tree(connection, balancer.id))


def rendered(cloud, balancer):
    """Return the output of `amphoractl loadbalancer render`."""
    program = Path(sys.executable).with_name("amphoractl")
    command = [program, "--config-file", cloud.settings.driver_configuration, "loadbalancer", "render", balancer.id]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class Client:
    """A client of one load balancer, by default in the client's namespace."""

    def __init__(self, cloud, balancer, *, version=4, host=topology.CLIENT):
        additional = balancer.additional_vips[0]["ip_address"]
        self.address = balancer.vip_address if version == 4 else additional
        self._place = namespaces.path(cloud.settings.host(host))

    def ask(self, path="/", *, port=80, context=None, headers=None):
        """Return status, headers (lower case) and body of an answer, or the error's name."""

        def go():
            connection = http.client.HTTPConnection(self.address, port, timeout=10)
            try:
                connection.connect()
                if context is not None:
                    connection.sock = context.wrap_socket(connection.sock, server_hostname="two.example.com")
                connection.request("GET", path, headers=headers or {})
                answer = connection.getresponse()
                found = {name.lower(): value for name, value in answer.getheaders()}
                return answer.status, found, answer.read().decode()
            except OSError as error:
                return type(error).__name__, {}, ""
            finally:
                connection.close()

        return namespaces.run_inside(self._place, go)

    def echoed(self, path="/", **more):
        """Return the request that the member received."""
        status, _, body = self.ask(path, **more)
        assert status == 200, body
        return json.loads(body)


def identity(tmp_path, certificate=None):
    """Return the TLS context of a client, with or without a client certificate."""
    context = ssl.create_default_context(cadata=authorities.ROOT.pem)
    if certificate is not None:
        (tmp_path / "client.pem").write_text(certificate.pem)
        context.load_cert_chain(tmp_path / "client.pem")
    return context


@pytest.mark.feature(
    "lb.name", "lb.description", "lb.tags", "lb.vip_subnet_id", "lb.additional_vips", "listener.tags", "pool.tags"
)
@pytest.mark.feature("member.tags", "healthmonitor.tags", "l7policy.tags", "l7rule.tags", "l7policy.description")
@BOTH
def test_octavia_and_the_provider_record_the_same(place, name):
    cloud, made = place
    assert_agreed(cloud, made[name])
    asked = whole_model.head(name)
    shown = cloud.balancers.get(cloud.url(f"loadbalancers/{made[name].id}")).json()["loadbalancer"]
    for field in ("name", "description", "vip_subnet_id"):
        assert shown[field] == asked[field]
    assert sorted(shown["tags"]) == sorted(asked["tags"])
    tagged = cloud.balancers.get(cloud.url(f"loadbalancers?tags=whole,{name}")).json()["loadbalancers"]
    assert [one["id"] for one in tagged] == [made[name].id]
    for kind, objects in (("listeners", whole_model.LISTENERS), ("pools", whole_model.POOLS)):
        found = cloud.balancers.get(cloud.url(f"{kind}?load_balancer_id={made[name].id}")).json()[kind]
        tags = {one["name"]: sorted(one["tags"]) for one in found}
        assert tags == {one["name"]: sorted(one.get("tags", [])) for one in objects}


@pytest.mark.extended
def test_both_ways_make_the_same_configuration(place):
    cloud, made = place
    steps, post = (
        whole_model.in_words(tree_of(cloud, balancer), rendered(cloud, balancer))
        for balancer in (made["steps"], made["post"])
    )
    assert steps == post
    assert len(steps) > 10


@pytest.mark.feature("lb.status", "listener.admin_state_up", "l7policy.admin_state_up", "l7rule.admin_state_up")
@BOTH
def test_all_objects_are_active_and_online(place, name):
    cloud, made = place
    names = dict(whole_model.names(tree_of(cloud, made[name])))
    expected = {word: ("ACTIVE", "OFFLINE" if word in OFF else "ONLINE") for word in names.values()}

    def seen():
        def walk(node):
            if isinstance(node, dict):
                if "provisioning_status" in node:
                    found[node["id"]] = (node["provisioning_status"], node["operating_status"])
                for child in node.values():
                    walk(child)
            for child in node if isinstance(node, list) else ():
                walk(child)

        found = {}
        walk(cloud.balancers.get(cloud.url(f"loadbalancers/{made[name].id}/status")).json())
        # That answer omits policies, rules, and pools that only policies use.
        for kind in ("pools", "l7policies"):
            for one in cloud.balancers.get(cloud.url(kind)).json()[kind]:
                walk(one)
                child = {"pools": "members", "l7policies": "rules"}[kind]
                walk(cloud.balancers.get(cloud.url(f"{kind}/{one['id']}/{child}")).json())
        walk(cloud.balancers.get(cloud.url("healthmonitors")).json())
        return {word: found.get(object_id) for object_id, word in names.items() if object_id in found}

    try:
        cloud.until(lambda: seen() == expected, "every object is ACTIVE and ONLINE", 60)
    except AssertionError:
        assert seen() == expected, "every object is ACTIVE and ONLINE"


@BOTH
def test_headers_are_inserted(place, name):
    cloud, made = place
    for version, client in ((4, "198.51.100.2"), (6, "2001:db8:1::2")):
        found = Client(cloud, made[name], version=version).echoed(headers={"X-Real-IP": "203.0.113.1"})["headers"]
        inserted = {word: found.get(word) for word in ("x-forwarded-for", "x-forwarded-port", "x-real-ip")}
        assert inserted == {"x-forwarded-for": client, "x-forwarded-port": "80", "x-real-ip": client}
        assert "x-forwarded-proto" not in found, "this header is disabled"


@BOTH
def test_policies_decide(place, name):
    cloud, made = place
    client = Client(cloud, made[name])
    inside = {"Host": "www.example.com"}
    status, headers, _ = client.ask("/account/1?x=y", headers=inside)
    assert (status, headers["location"]) == (308, "https://secure.example.com/a?b=c&d/account/1?x=y")
    assert client.ask("/account/1")[0] == 200, "the rule requires another host"
    status, headers, _ = client.ask("/old/17")
    assert (status, headers["location"]) == (301, "http://example.com/new?a=1&b=2#three")
    assert client.ask("/old/17/x")[0] == 200
    sealed = client.echoed("/a/b.png")
    assert (sealed["member"], sealed["client"]) == ("member3", "two.example.com"), "the pool presents its certificate"
    plain = client.echoed("/a/b.png", headers={"Cookie": "choice=plain&simple"})
    assert plain["member"] in ("member1", "member2")
    assert client.ask("/old/17", headers={"User-Agent": "a bot"})[0] == 403, "the first policy applies"


@BOTH
def test_a_cookie_keeps_a_client_on_its_member(place, name):
    cloud, made = place
    client = Client(cloud, made[name])
    assert {client.echoed()["member"] for _ in range(6)} == {"member1", "member2"}
    status, headers, body = client.ask()
    assert status == 200
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} <= set(attributes)
    mine = {client.echoed(headers={"Cookie": cookie})["member"] for _ in range(6)}
    assert mine == {json.loads(body)["member"]}


@BOTH
def test_only_allowed_clients_have_access(place, name):
    cloud, made = place
    balancer = made[name]
    assert Client(cloud, balancer).ask()[0] == 200
    assert isinstance(Client(cloud, balancer, host="member1").ask()[0], str), "the list excludes members"
    assert Client(cloud, balancer, host="member1").ask(port=8000)[0] == 200, "this listener has no list"
    assert Client(cloud, balancer).ask("/metrics", port=9100)[0] == 200
    assert isinstance(Client(cloud, balancer, version=6).ask("/metrics", port=9100)[0], str)


@BOTH
def test_tls_with_and_without_a_clients_certificate(place, name, tmp_path):
    cloud, made = place
    client = Client(cloud, made[name])

    def ask(path, certificate=None):
        return client.ask(path, port=443, context=identity(tmp_path, certificate))

    status, headers, body = ask("/")
    assert (status, headers["strict-transport-security"]) == (200, "max-age=31536000; includeSubDomains; preload;")
    assert headers["set-cookie"].endswith("Secure") or "Secure" in headers["set-cookie"].split("; ")
    asked = json.loads(body)["headers"]
    assert (asked["x-forwarded-proto"], asked["x-ssl-client-has-cert"]) == ("https", "0")
    assert ask("/members")[0] == 403
    status, _, body = ask("/members", authorities.ADA)
    assert (status, json.loads(body)["headers"]["x-ssl-client-cn"]) == (200, "ada")
    assert ask("/", authorities.BOB)[0] == 403
    assert isinstance(ask("/", authorities.EVE)[0], str), "the certificate is revoked"


@BOTH
def test_fields_without_an_effect_are_kept(place, name, tmp_path):
    cloud, made = place
    for version in (4, 6):
        client = Client(cloud, made[name], version=version)
        answers = {client.ask(port=8000)[2].strip() for _ in range(6)}
        assert len(answers) == 1, "the client's address selects the member"
        assert answers <= {"member1", "member2"}
        context = identity(tmp_path, authorities.TWO)
        context.check_hostname = False
        assert json.loads(client.ask(port=8443, context=context)[2])["member"] == "member3"
        assert isinstance(client.ask(port=81)[0], str), "the listener is disabled"


def test_a_cascade_leaves_nothing(place):
    """Runs last in this file, because it deletes the load balancers."""
    cloud, made = place
    assert made["post"]
    for balancer in made.values():
        cloud.balancers.delete_load_balancer(balancer.id, cascade=True)
    for balancer in made.values():
        cloud.gone(balancer.id)
    for kind in ("listeners", "pools", "healthmonitors", "l7policies"):
        assert cloud.balancers.get(cloud.url(kind)).json()[kind] == []
    left = [(table, balancer) for table in tables.metadata.sorted_tables for balancer in made.values()]
    for table, balancer in left:
        if "load_balancer_id" in table.c:
            query = sa.select(sa.func.count()).select_from(table).where(table.c.load_balancer_id == balancer.id)
            cloud.until(
                lambda query=query: not cloud.database.read(lambda connection: connection.execute(query).scalar()),
                f"{table.name} has no rows of {balancer.name}",
            )
    for balancer in made.values():
        assert isinstance(Client(cloud, balancer).ask()[0], str)
