# SPDX-License-Identifier: Apache-2.0
"""Virt driver for tests: Nova's fake driver, and a real guest that the hypervisor of the tests runs.

The guest gets Nova's own config drive as a tree of files: INSTANCES/UUID has `openstack/latest` and the contents.
The variable LAB_HYPERVISOR names the socket of the hypervisor (`tests/openstack/hypervisor.py`). A server whose flavor
has a name that begins with `without-guest` has no guest: the hypervisor only refuses its boot if a test asks for it.
"""

import os
import shutil
from pathlib import Path

import lab_socket
import nova.conf
from nova import exception
from nova.api.metadata import base as metadata
from nova.virt import configdrive, fake, node

CONF = nova.conf.CONF
_WITHOUT_GUEST = "without-guest"


class LabDriver(fake.FakeDriver):
    """Runs guests as namespaces of this machine."""

    vcpus, memory_mb, local_gb = 64, 65536, 1024

    # The fake driver draws the id of its node anew in each process, and Nova refuses a host whose id has changed.
    def get_available_resource(self, nodename):
        return {**super().get_available_resource(nodename), "uuid": node.get_local_node_uuid()}

    def get_nodenames_by_uuid(self, refresh=False):
        return {node.get_local_node_uuid(): self.get_available_nodes()[0]}

    def spawn(
        self, context, instance, image_meta, injected_files, admin_password, allocations, network_info=None, **more
    ):
        super().spawn(context, instance, image_meta, injected_files, admin_password, allocations, network_info, **more)
        try:
            if _has_guest(instance):
                drive = self._write_drive(instance, injected_files, network_info)
                ports = [_port(vif) for vif in network_info or ()]
                self._ask("spawn", instance, drive=drive, ports=ports, image=image_meta.name)
            else:
                lab_socket.ask(os.environ["LAB_HYPERVISOR"], "admit")
        except (OSError, lab_socket.RefusedError) as error:
            super().destroy(context, instance, network_info)
            raise exception.InstanceDeployFailure(reason=str(error)) from error

    def destroy(self, context, instance, network_info, *words, **more):
        self._ask("destroy", instance)
        shutil.rmtree(_folder(instance), ignore_errors=True)
        for vif in network_info or ():
            self._interfaces.pop(vif["id"], None)
        super().destroy(context, instance, network_info, *words, **more)

    def attach_interface(self, context, instance, image_meta, vif):
        super().attach_interface(context, instance, image_meta, vif)
        try:
            self._ask("attach", instance, port=_port(vif))
        except (OSError, lab_socket.RefusedError) as error:
            self._interfaces.pop(vif["id"], None)
            raise exception.InterfaceAttachFailed(instance_uuid=instance.uuid) from error

    def detach_interface(self, context, instance, vif):
        self._ask("detach", instance, port_id=vif["id"])
        super().detach_interface(context, instance, vif)

    def power_off(self, instance, timeout=0, retry_interval=0):
        super().power_off(instance, timeout, retry_interval)
        self._ask("power_off", instance)

    def power_on(self, context, instance, network_info, **more):
        super().power_on(context, instance, network_info, **more)
        self._ask("power_on", instance)

    def get_console_output(self, context, instance):
        return self._ask("console", instance)["text"]

    def _ask(self, verb, instance, **request):
        if not _has_guest(instance):
            return {"text": ""}
        return lab_socket.ask(os.environ["LAB_HYPERVISOR"], verb, server=instance.uuid, host=CONF.host, **request)

    @staticmethod
    def _write_drive(instance, injected_files, network_info):
        """Write the content of the config drive; return its root, None if the server has no config drive."""
        if not configdrive.required_by(instance):
            return None
        found = metadata.InstanceMetadata(instance, content=injected_files, network_info=network_info)
        root = _folder(instance)
        for path, data in found.metadata_for_config_drive():
            place = root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data.encode() if isinstance(data, str) else data)
        return str(root)


def _has_guest(instance):
    return not instance.flavor.name.startswith(_WITHOUT_GUEST)


def _folder(instance):
    return Path(CONF.instances_path) / instance.uuid


def _port(vif):
    addresses = [
        {"address": ip["address"], "prefix": int(subnet["cidr"].rpartition("/")[2])}
        for subnet in vif["network"]["subnets"]
        for ip in subnet["ips"]
    ]
    network = vif["network"]
    return {
        "id": vif["id"],
        "mac": vif["address"],
        "network_id": network["id"],
        "mtu": network.get_meta("mtu"),
        "addresses": addresses,
    }
