# SPDX-License-Identifier: Apache-2.0
"""The compute backend `nova`: its requests to Nova and Glance, and their order."""

import base64
import json
import traceback

import pytest
from nova_answers import (
    AMPHORA,
    CREATED,
    FIND,
    FLAVOR,
    GONE,
    KEY,
    LOAD_BALANCER,
    MADE,
    NOTHING,
    POST,
    TAGS,
    boot_request,
    delete,
    failed,
    listed,
    refused,
    server,
)

from amphora_driver.compute.interface import BootPartner, Location, Machine, MachineState, Placement
from amphora_driver.compute.nova import NovaCompute
from amphora_driver.errors import ComputeError, ConfigurationError, Conflict, NetworkError
from amphora_driver.openstack.errors import TimedOut
from amphora_driver.secret import Secret

GROUPS = "GET /os-server-groups?limit=1000&offset="
GROUP_NAME = f"octavia-amphora-one-{LOAD_BALANCER}"
PARTNER = BootPartner(amphora_id="p", compute_id="server-7", location=Location(host="h", zone="az1"))


def hints(made):
    return made.script.bodies[-1].get("os:scheduler_hints")


class TestConstruction:
    @pytest.mark.parametrize(
        ("openstack", "options", "named"),
        [
            ({"deployment_id": None}, {}, "deployment_id"),
            ({}, {"image_owner": None}, "image_owner.*CVE-2019-3895"),
            ({}, {"management_networks": None}, "management_networks"),
        ],
    )
    def test_a_missing_option_is_named_with_a_remedy(self, make_nova, openstack, options, named):
        with pytest.raises(ConfigurationError, match=named) as caught:
            make_nova(openstack=openstack, **options)
        assert caught.value.remedy

    def test_it_sends_no_request(self, make_nova):
        assert make_nova().script.requests == []

    def test_it_uses_ports_of_neutron(self):
        assert (NovaCompute.wiring, NovaCompute.plugs_while_booting) == ("nova", False)


class TestBoot:
    def test_a_new_server(self, make_nova):
        made = make_nova(*CREATED)
        assert made.boot(boot_request()) == Machine(
            compute_id="server-9", state=MachineState.BUILDING, management_address="192.0.2.7", image="image-1"
        )
        body = made.script.bodies[0]
        user_data = json.loads(base64.b64decode(body["server"].pop("user_data")))
        assert user_data == {"amphora_files": {"agent.conf": "[agent]\nbind_address = 192.0.2.7\n", "server.pem": KEY}}
        assert body == {
            "server": {
                "name": f"octavia-amphora-{AMPHORA}",
                "flavorRef": "amphora",
                "imageRef": "image-1",
                "networks": [{"port": "port-management"}],
                "tags": TAGS,
                "metadata": {
                    "amphora_deployment": "one",
                    "amphora_id": AMPHORA,
                    "amphora_booted_for": LOAD_BALANCER,
                    "amphora_image": "image-1",
                    "amphora_management_address": "192.0.2.7",
                },
                "config_drive": True,
            }
        }
        assert made.script.finished()

    def test_requests_and_answers_with_keys_are_not_logged(self, make_nova):
        made = make_nova(*CREATED)
        made.boot(boot_request())
        assert made.script.logged == [FLAVOR[0]]
        details = f"GET /servers/detail?tags={TAGS[0]}&limit=1000"
        made.script.continue_with((details, listed(server(**{"OS-EXT-SRV-ATTR:user_data": "a2V5"}))))
        assert "a2V5" not in str(made._nova.list_servers(TAGS[0], detail=True))
        assert made.script.logged == [FLAVOR[0]]

    def test_a_refusal_that_quotes_the_body_shows_no_keys(self, make_nova):
        quoted = base64.b64encode(KEY.encode() * 9).decode()
        made = make_nova(*CREATED[:2], (POST, refused(400, f"Invalid input for server. Value: {quoted}. It is bad")))
        with pytest.raises(ComputeError, match=r"Value: \*\*\*\. It is bad") as caught:
            made.boot(boot_request())
        assert quoted[:64] not in "".join(traceback.format_exception(caught.value))

    def test_several_management_networks(self, make_nova):
        made = make_nova(*CREATED, management_networks="first,second")
        made.boot(boot_request())
        assert made.script.bodies[0]["server"]["networks"] == [{"port": "port-first"}, {"port": "port-second"}]
        assert [one.network_id for one in made.ports.ensured] == ["first", "second"]

    def test_the_request_replaces_the_defaults(self, make_nova):
        flavor = ("GET /flavors/large", {"flavor": {"id": "large"}})
        made = make_nova((FIND, NOTHING), flavor, MADE, key_name="ops", zones="az9")
        made.boot(boot_request(flavor="large", zones=("az1",), image_tag="special", management_networks=("other",)))
        body = made.script.bodies[0]["server"]
        assert (body["flavorRef"], body["availability_zone"], body["key_name"]) == ("large", "az1", "ops")
        assert body["networks"] == [{"port": "port-other"}]
        assert made.glance.params[0]["tag"] == "special"

    def test_a_flavor_by_name_is_looked_up_once(self, make_nova):
        page = "GET /flavors?is_public=None&limit=1000"
        first = {"flavors": [{"id": "1", "name": "small"}], "flavors_links": [{"rel": "next"}]}
        more = {"flavors": [{"id": "2", "name": "amphora"}]}
        made = make_nova(
            (FIND, NOTHING), (FLAVOR[0], GONE), (page, first), (f"{page}&marker=1", more), MADE, (FIND, NOTHING), MADE
        )
        made.boot(boot_request())
        made.boot(boot_request())
        assert [one["server"]["flavorRef"] for one in made.script.bodies] == ["2", "2"]

    @pytest.mark.parametrize(
        ("answers", "images", "options", "named"),
        [
            ([(FLAVOR[0], GONE), ("GET /flavors?is_public=None&limit=1000", {"flavors": []})], ["i"], {}, "'amphora'"),
            ([], ["i"], {"flavor": None}, "compute_flavor"),
            ([FLAVOR], [None], {}, "tag 'amphora' and the owner owner"),
        ],
    )
    def test_a_missing_flavor_or_image_is_final_and_leaves_no_port(self, make_nova, answers, images, options, named):
        made = make_nova((FIND, NOTHING), *answers, images=images, **options)
        with pytest.raises(ComputeError, match=named) as caught:
            made.boot(boot_request())
        assert caught.value.final
        assert made.ports.ensured == []

    def test_a_boot_volume(self, make_nova):
        made = make_nova(*CREATED, boot_volume_size=4, boot_volume_type="fast")
        made.boot(boot_request())
        [volume] = made.script.bodies[0]["server"]["block_device_mapping_v2"]
        assert (volume["volume_size"], volume["volume_type"], volume["delete_on_termination"]) == (4, "fast", True)

    def test_a_document_above_the_limit_is_refused_before_the_request(self, make_nova):
        made = make_nova(*CREATED[:2])
        with pytest.raises(ComputeError, match="65535") as caught:
            made.boot(boot_request(files={"agent.conf": Secret(b"x" * 60000)}))
        assert caught.value.final


class TestBootOfAnExistingServer:
    def test_it_is_returned(self, make_nova):
        made = make_nova((FIND, listed(server(status="BUILD"))))
        found = made.boot(boot_request())
        assert (found.compute_id, found.state, found.management_address) == (
            "server-1",
            MachineState.BUILDING,
            "192.0.2.7",
        )
        assert (made.script.bodies, made.ports.ensured) == ([], [])

    def test_duplicates_are_deleted(self, make_nova):
        older = server("server-0", "BUILD", created="2026-11-24T09:00:00Z")
        made = make_nova((FIND, listed(server("a"), older, failed("b"))), (delete("a"), None), (delete("b"), None))
        assert made.boot(boot_request()).compute_id == "server-0"
        assert made.script.requests[1:] == [delete("a"), delete("b")]

    def test_a_failed_one_is_replaced_after_its_removal(self, make_nova):
        deleting = server(**{"OS-EXT-STS:task_state": "deleting"})
        made = make_nova(
            (FIND, listed(failed(message="Disk error"))),
            (delete("server-1"), None),
            (FIND, listed(deleting)),
            (FIND, NOTHING),
            FLAVOR,
            MADE,
        )
        assert made.boot(boot_request()).compute_id == "server-9"

    def test_a_failed_one_that_stays_prevents_a_second_one(self, make_nova):
        made = make_nova((FIND, listed(failed())), (delete("server-1"), None), (FIND, listed(failed())))
        with pytest.raises(ComputeError, match="still being deleted: server-1") as caught:
            made.boot(boot_request())
        assert not caught.value.final
        assert made.script.bodies == []

    @pytest.mark.parametrize("tags", [[], TAGS[:1], TAGS[1:], ["amphora-deployment:two", TAGS[1]]])
    def test_a_server_without_both_tags_is_not_touched(self, make_nova, tags):
        made = make_nova((FIND, listed(server(tags=tags))), *CREATED[1:])
        assert made.boot(boot_request()).compute_id == "server-9"
        assert [one for one in made.script.requests if one.startswith("DELETE")] == []

    def test_a_boot_is_not_repeated_after_a_time_out(self, make_nova):
        made = make_nova(*CREATED[:2], (POST, TimedOut("POST /servers", "ConnectTimeout")))
        with pytest.raises(ComputeError, match="POST /servers: ConnectTimeout") as caught:
            made.boot(boot_request())
        assert not caught.value.final
        assert made.script.requests.count(POST) == 1


class TestPlacement:
    def test_the_hint_names_the_partners(self, make_nova):
        made = make_nova(*CREATED)
        made.boot(boot_request(partners=(PARTNER,), placement=Placement.PREFERRED))
        assert hints(made) == {"different_host": ["server-7"]}

    @pytest.mark.parametrize("values", [{"placement": Placement.NONE, "partners": (PARTNER,)}, {}])
    def test_no_hint(self, make_nova, values):
        made = make_nova(*CREATED)
        made.boot(boot_request(**values))
        assert hints(made) is None

    @pytest.mark.parametrize(
        ("placement", "spare", "kept"),
        [
            (Placement.PREFERRED, False, False),
            (Placement.REQUIRED, False, True),
            (Placement.REQUIRED, True, False),
        ],
    )
    def test_a_preference_that_left_no_hypervisor_is_omitted(self, make_nova, placement, spare, kept):
        made = make_nova((FIND, listed(failed())), (delete("server-1"), None), *CREATED)
        made.boot(boot_request(partners=(PARTNER,), placement=placement, spare=spare))
        assert (hints(made) is not None) is kept

    def test_another_failure_does_not_change_the_hint(self, make_nova):
        made = make_nova((FIND, listed(failed(message="Disk error"))), (delete("server-1"), None), *CREATED)
        made.boot(boot_request(partners=(PARTNER,)))
        assert hints(made) is not None

    def test_a_pair_spans_two_zones(self, make_nova):
        made = make_nova(*CREATED, zones="az1,az2")
        machine = made.boot(boot_request(partners=(PARTNER,)))
        assert made.script.bodies[0]["server"]["availability_zone"] == "az2"
        # The next boot may follow before Nova reports the zone.
        assert machine.location == Location(zone="az2")

    def test_a_zone_that_nova_refuses_is_replaced_by_the_next_one(self, make_nova, caplog):
        answer = refused(400, "The requested availability zone is not available")
        made = make_nova(*CREATED[:2], (POST, answer), MADE, zones="az1,az2")
        machine = made.boot(boot_request(partners=(PARTNER,)))
        assert (machine.compute_id, machine.location) == ("server-9", Location(zone="az1"))
        assert [one["server"]["availability_zone"] for one in made.script.bodies] == ["az2", "az1"]
        assert "az2" in caplog.text

    def test_the_last_zone_and_other_refusals_are_errors(self, make_nova):
        answer = refused(400, "The requested availability zone is not available")
        made = make_nova(*CREATED[:2], (POST, answer), zones="az1")
        with pytest.raises(ComputeError, match="availability zone"):
            made.boot(boot_request())
        made = make_nova(*CREATED[:2], (POST, refused(400, "Invalid key_name provided")), zones="az1,az2")
        with pytest.raises(ComputeError, match="key_name"):
            made.boot(boot_request())


class TestServerGroups:
    def group(self, group_id="g", *members, name=GROUP_NAME):
        return {"id": group_id, "name": name, "policy": "anti-affinity", "members": list(members)}

    @pytest.mark.parametrize(
        ("placement", "policy"),
        [(Placement.REQUIRED, "anti-affinity"), (Placement.PREFERRED, "soft-anti-affinity")],
    )
    def test_the_first_boot_creates_the_group(self, make_nova, placement, policy):
        made = make_nova(
            *CREATED[:2],
            (f"{GROUPS}0", {"server_groups": []}),
            ("POST /os-server-groups", {"server_group": self.group()}),
            MADE,
            server_groups=True,
        )
        made.boot(boot_request(placement=placement))
        assert made.script.bodies[0] == {"server_group": {"name": GROUP_NAME, "policy": policy}}
        assert hints(made) == {"group": "g"}

    def test_a_later_boot_finds_the_group(self, make_nova):
        other = self.group("a", name=f"octavia-lb-{LOAD_BALANCER}")
        made = make_nova(
            *CREATED[:2],
            (f"{GROUPS}0", {"server_groups": [other, self.group("h")]}),
            (f"{GROUPS}1", {"server_groups": [self.group("h"), self.group("g", "server-7")]}),
            (f"{GROUPS}2", {"server_groups": [self.group("g", "server-7")]}),
            MADE,
            server_groups=True,
        )
        made.boot(boot_request(partners=(PARTNER,)))
        assert hints(made) == {"group": "g"}

    def test_a_deletion_between_two_pages_hides_no_group(self, make_nova):
        other = self.group("a", name=f"octavia-lb-{LOAD_BALANCER}")
        made = make_nova(
            *CREATED[:2],
            (f"{GROUPS}0", {"server_groups": [other, self.group("h")]}),
            (f"{GROUPS}1", {"server_groups": [self.group("g", "server-7")]}),
            (f"{GROUPS}0", {"server_groups": [self.group("h"), self.group("g", "server-7")]}),
            (f"{GROUPS}1", {"server_groups": [self.group("g", "server-7")]}),
            MADE,
            server_groups=True,
        )
        made.boot(boot_request(partners=(PARTNER,)))
        assert hints(made) == {"group": "g"}
        assert made.script.finished()

    def test_a_former_spare_is_kept_apart_although_it_is_no_member(self, make_nova):
        spare = BootPartner(amphora_id="s", compute_id="spare")
        page = (f"{GROUPS}0", {"server_groups": [self.group("g", "server-7")]})
        made = make_nova(*CREATED[:2], page, MADE, server_groups=True)
        made.boot(boot_request(partners=(PARTNER, spare)))
        assert hints(made) == {"group": "g", "different_host": ["spare"]}

    @pytest.mark.parametrize("values", [{"spare": True}, {"placement": Placement.NONE}])
    def test_no_group(self, make_nova, values):
        made = make_nova(*CREATED, server_groups=True)
        made.boot(boot_request(**values))
        assert hints(made) is None

    def test_the_end_of_a_load_balancer_removes_its_groups_only(self, make_nova):
        other = self.group("o", name=f"octavia-amphora-two-{LOAD_BALANCER}")
        made = make_nova(
            (f"{GROUPS}0", {"server_groups": [other, self.group("g"), self.group("h")]}),
            (f"{GROUPS}2", {"server_groups": [self.group("h")]}),
            ("DELETE /os-server-groups/g", None),
            ("DELETE /os-server-groups/h", GONE),
            server_groups=True,
        )
        made.release_load_balancer(LOAD_BALANCER)
        assert made.script.requests[2:] == ["DELETE /os-server-groups/g", "DELETE /os-server-groups/h"]

    def test_without_the_option_the_end_needs_no_request(self, make_nova):
        made = make_nova()
        made.release_load_balancer(LOAD_BALANCER)
        assert made.script.requests == []


class TestErrors:
    @pytest.mark.parametrize(
        ("answer", "named", "final"),
        [
            (refused(403, "Quota exceeded for cores: Requested 1, but already used 4 of 4 cores"), "quota", True),
            (refused(403, "Policy doesn't allow os_compute_api:servers:create"), r"nova\.md", True),
            (refused(400, "Can not find requested image"), "Can not find requested image", True),
            (refused(406, "Version 2.67 is not supported by the API"), "2.67", True),
            (refused(409, "Port x is still in use", "conflictingRequest"), "still in use", False),
            (refused(500, "Unexpected API Error", "computeFault"), "status 500", False),
            (NetworkError(POST, "ConnectFailure: refused"), "ConnectFailure", False),
        ],
    )  # fmt: skip
    def test_a_refused_boot(self, make_nova, answer, named, final):
        made = make_nova(*CREATED[:2], (POST, answer))
        with pytest.raises(ComputeError, match=f"boot amphora {AMPHORA}.*{named}") as caught:
            made.boot(boot_request())
        assert caught.value.final is final

    def test_a_rejected_account(self, make_nova):
        with pytest.raises(ConfigurationError):
            make_nova((FIND, refused(401, "The request you have made requires authentication"))).get(AMPHORA)

    @pytest.mark.parametrize(
        ("error", "final"),
        [
            (NetworkError("create a port", "a quota is used up", "Raise it.", final=True), True),
            (NetworkError("create a port", "no answer"), False),
            (Conflict("create a port", "no address is free"), True),
        ],
    )
    def test_a_refused_port(self, make_nova, error, final):
        made = make_nova(*CREATED[:2])
        made.ports.error = error
        with pytest.raises(ComputeError, match=f"create a port: {error.happened}") as caught:
            made.boot(boot_request())
        assert (caught.value.final, caught.value.remedy) == (final, error.remedy)

    def test_a_network_without_addresses(self, make_nova):
        made = make_nova(*CREATED[:2])
        made.ports.addresses = ()
        with pytest.raises(ComputeError, match="has no address") as caught:
            made.boot(boot_request())
        assert caught.value.final


class TestGet:
    def test_none(self, make_nova):
        assert make_nova((FIND, NOTHING)).get(AMPHORA) is None

    def test_a_failure_has_novas_text(self, make_nova):
        found = make_nova((FIND, listed(failed(message="No valid host was found.")))).get(AMPHORA)
        assert (found.state, found.location.host) == (MachineState.FAILED, None)
        assert found.reason.endswith("No valid host was found")

    def test_a_foreign_server_is_none(self, make_nova):
        assert make_nova((FIND, listed(server(tags=TAGS[1:])))).get(AMPHORA) is None


class TestImages:
    def test_the_newest_image_of_tag_and_owner(self, make_nova):
        made = make_nova()
        assert made.image(None) == "image-1"
        assert made.glance.params == [
            {
                "tag": "amphora",
                "owner": "owner",
                "status": "active",
                "sort": "created_at:desc,id:desc",
                "limit": "1",
            }
        ]

    def test_it_is_cached_and_a_boot_refreshes_it(self, make_nova):
        made = make_nova(*CREATED)
        made.image("t")
        made.image("t")
        assert len(made.glance.params) == 1
        made.image("amphora")
        made.glance.images = ["image-2"]
        assert made.image(None) == "image-1"
        assert made.boot(boot_request()).image == "image-2"
        assert made.image(None) == "image-2"

    def test_an_image_of_another_owner_is_not_used(self, make_nova, monkeypatch):
        made = make_nova()
        monkeypatch.setattr(made.glance, "request", lambda *_, **__: {"images": [{"id": "bad", "owner": "attacker"}]})
        assert made.image(None) is None

    @pytest.mark.parametrize("answer", [None, NetworkError("GET /images", "no answer"), refused(500, "oops")])
    def test_a_failure_is_logged(self, make_nova, caplog, answer):
        assert make_nova(images=[answer]).image(None) is None
        assert "keep their images" in caplog.text
