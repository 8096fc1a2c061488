# SPDX-License-Identifier: Apache-2.0
"""The recipes for deployment tools use variables that the tools define, and options that the driver has.

`recipe_names.json` has the names that were found in the sources of each tool, with the commits of these sources. A new
name in a recipe must be looked up in the sources first.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import jinja2
import jinja2.meta
import pytest
import yaml

from amphora_driver import config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NAMES = json.loads(Path(__file__).with_name("recipe_names.json").read_text(encoding="utf-8"))
OWN = re.compile(r"amphora_driver_\w+|AMPHORA_DRIVER_\w+")
# Variables of Ansible and of tasks.
ANSIBLE = {"ansible_managed", "ansible_facts", "ansible_playbook_python", "groups", "group_names", "hostvars", "item"}
ANSIBLE |= {"inventory_hostname", "omit", "role_path", "service", "service_name", "controller"}
# Filters of Ansible and of Kolla-Ansible, which Jinja needs to parse an expression.
FILTERS = ("bool", "ternary", "kolla_address", "put_address_in_context", "select_services_enabled_and_mapped_to_host")
# Words at the start of a line of the devstack plug-in that are no functions.
SHELL = {"function", "local", "if", "elif", "else", "fi", "return", "umask", "sudo", "echo", "mysql", "openstack"}


def recipes(tool):
    return [path for path in sorted((DEPLOY / tool).rglob("*")) if path.suffix in {".yml", ".j2"}]


def environment():
    found = jinja2.Environment()
    found.filters |= dict.fromkeys(FILTERS, str)
    return found


def used_variables(path):
    """Variables in the expressions of a file, and those that a file of variables sets."""
    text = path.read_text(encoding="utf-8")
    found = jinja2.meta.find_undeclared_variables(environment().parse(text.replace('\\"', '"')))
    if path.name.startswith(("user_", "globals", "passwords")):
        found |= set(yaml.safe_load(text))
    for condition in re.findall(r"^\s+when: (.*)$", text, re.MULTILINE):
        found |= jinja2.meta.find_undeclared_variables(environment().parse("{{ " + condition + " }}"))
    return found


@pytest.mark.parametrize("tool", ["kolla-ansible", "openstack-ansible"])
def test_every_variable_is_known_to_the_tool(tool):
    used = {name for path in recipes(tool) for name in used_variables(path)}
    foreign = {name for name in used if not OWN.fullmatch(name)} - ANSIBLE
    assert len(foreign) > 10
    assert foreign - set(NAMES[tool]["names"]) == set()


@pytest.mark.parametrize("tool", ["kolla-ansible", "openstack-ansible"])
def test_every_own_variable_has_a_value(tool):
    used, defined = set(), set()
    for path in recipes(tool):
        used |= {name for name in used_variables(path) if OWN.fullmatch(name)}
        if path.suffix == ".yml" and isinstance(content := yaml.safe_load(path.read_text(encoding="utf-8")), dict):
            defined |= set(content)
    assert used - defined == set()


def test_every_name_of_devstack_is_known():
    text = (ROOT / "devstack/plugin.sh").read_text(encoding="utf-8") + (ROOT / "devstack/settings").read_text()
    used = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", text)) - {"END"}
    assert {name for name in used if not OWN.fullmatch(name)} - set(NAMES["devstack"]["names"]) == set()
    script = re.sub(r"<<'END'.*?^END$", "", text, flags=re.DOTALL | re.MULTILINE)
    own = set(re.findall(r"^function (\w+)", script, re.MULTILINE))
    called = set(re.findall(r"^\s*([a-z_]+)(?= |$)", script, re.MULTILINE)) | set(re.findall(r"\$\((\w+)", script))
    unknown = called - own - SHELL - set(NAMES["devstack"]["functions"])
    assert unknown == set()
    assert "setup_develop" in called


def options_of(text):
    """Groups and options of a configuration file, with the template's expressions removed."""
    group = None
    for line in re.sub(r"\{%.*?%\}|\{#.*?#\}", "", text).splitlines():
        if (head := re.fullmatch(r"\s*\[(\w+)\]", line)) is not None:
            group = head[1]
        elif (found := re.match(r"\s*(\w+) = ", line)) is not None and group:
            yield group, found[1]


def known_options():
    known = {(group, option.name) for group, options in config.GROUPS.items() for option in options}
    account = ("auth_type", "auth_url", "username", "password", "user_domain_name", "project_name")
    known |= {("amp_openstack", name) for name in (*account, "project_domain_name", "cafile", "insecure")}
    return known | {("DEFAULT", name) for name in ("debug", "log_dir", "use_json", "watch_log_file")}


@pytest.mark.parametrize(
    "template",
    [
        DEPLOY / "kolla-ansible/roles/amphora-driver/templates/amphora-driver.conf.j2",
        DEPLOY / "openstack-ansible/amphora-driver.conf.j2",
    ],
    ids=lambda path: path.parts[path.parts.index("deploy") + 1],
)
def test_every_option_of_a_template_exists(template):
    found = set(options_of(template.read_text(encoding="utf-8")))
    assert ("amp_health", "targets") in found
    assert found - known_options() == set()


@pytest.mark.parametrize("page", ["install.md", "install-three-controllers.md"])
def test_every_option_of_a_page_exists(page):
    text = (ROOT / "docs/how-to" / page).read_text(encoding="utf-8")
    found = {one for one in options_of(text) if one[0] not in {"api_settings", "driver_agent", "local"}}
    assert ("amp_database", "connection") in found
    assert found - known_options() == set()


def test_the_plugin_sets_existing_options():
    text = (ROOT / "devstack/plugin.sh").read_text(encoding="utf-8")
    found = set(re.findall(r'iniset "\$AMPHORA_DRIVER_CONF" (\w+) (\w+)', text))
    assert len(found) > 10
    assert found - known_options() == set()


def test_yaml_files_are_valid():
    for path in DEPLOY.rglob("*.yml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("script", ["devstack/plugin.sh", "devstack/settings"])
def test_scripts_have_no_syntax_error(script):
    done = subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
