# SPDX-License-Identifier: Apache-2.0
"""The finished, unmodified disk boots through its own boot loader, as in a cloud.

AMPHORA_IMAGE_SLOW=1 runs this test. AMPHORA_IMAGE_FILE names the disk; without it, diskimage/build makes one, which
takes minutes.
"""

import os
import shutil
import subprocess
from pathlib import Path

import image
import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.extended,
    pytest.mark.quiet,
    pytest.mark.lasts(3600),
    pytest.mark.skipif(os.environ.get("AMPHORA_IMAGE_SLOW") != "1", reason="AMPHORA_IMAGE_SLOW=1 runs this"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An image folder with the finished image."""
    place = tmp_path_factory.mktemp("finished")
    given = os.environ.get("AMPHORA_IMAGE_FILE")
    if given:
        shutil.copyfile(given, place / "finished.qcow2")
    else:
        command = [image.ROOT / "diskimage/build", "--name", "finished", "--directory", place]
        subprocess.run(command, check=True, timeout=3000)
    return Path(place)


def test_the_finished_disk_boots_and_its_agent_answers(finished, images, guest_lab, record_property):
    shutil.copyfile(finished / "finished.qcow2", images / "finished.qcow2")
    try:
        guest = guest_lab.boot("finished")
        record_property("power-on to agent through the boot loader, seconds", guest.await_agent(900))
        guest.disconnect()
        guest_lab.compute.destroy(guest.id)
        assert guest_lab.compute.get(guest.id) is None
    finally:
        (images / "finished.qcow2").unlink()
