# SPDX-License-Identifier: Apache-2.0
"""The status page as text: its content, and escaped hostile text."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import msgspec
import pytest
from fleet_rows import INTERVAL, NOW, balancer, fleet, identifier, machine, process
from test_alerts import AUTHORITY, GOING, ROTATION, UNKNOWN_AMPHORA

from amphora_driver.telemetry import status_page
from amphora_driver.telemetry.alerts import find_notices
from amphora_driver.telemetry.fleet_snapshot import BreakerInfo, SparePoolInfo
from amphora_driver.telemetry.snapshot_cache import View

PROCESS = status_page.ProcessIdentity(kind="controller", name="ctl:1", version="1", interval=3.0, silent_after=7.0)
EMPTY = {"meta", "link", "input", "br", "img", "rect"}
HOSTILE = "\"'><script>alert(1)</script><!--/balancers--><!--notices--><img src=x onerror=alert(2)>{{ 7 * 7 }}</style>"


def view(found, **more):
    return View(number=1, fleet=found, notices=find_notices(found, INTERVAL), **more)


class PageParser(HTMLParser):
    """Parses elements as a browser does, and checks that each opened element is closed."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.text, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(text):
    reading = PageParser()
    reading.feed(text.decode())
    assert reading.open == []
    return reading


def hostile(kind, value):
    """Return the value with hostile text in every string."""
    words = {field.name: HOSTILE for field in msgspec.structs.fields(kind) if field.type in (str, str | None)}
    for kept in ("state", "silence", "role"):
        if kept in words and getattr(value, kept) is not None:
            words.pop(kept)
    return msgspec.structs.replace(value, **words)


def everything_hostile():
    bad = machine(state="ready", silence="silent", silent_since=NOW - 5)
    return fleet(
        balancers=(
            msgspec.structs.replace(hostile(type(balancer()), balancer()), addresses=(HOSTILE,), state="ERROR"),
        ),
        amphorae=(msgspec.structs.replace(hostile(type(bad), bad), load_balancer_id=HOSTILE),),
        failovers=(hostile(type(GOING), GOING), msgspec.structs.replace(GOING, ended_at=NOW, outcome=HOSTILE)),
        breaker=BreakerInfo(state="open", reason=HOSTILE),
        processes=(hostile(type(process("x")), process("x")),),
        pools=(SparePoolInfo(id=HOSTILE, wanted=1, booted=0, ready=0, error=HOSTILE),),
        rotations=(hostile(type(ROTATION), ROTATION),),
        authorities=(hostile(type(AUTHORITY), AUTHORITY),),
        unknown_amphorae=(hostile(type(UNKNOWN_AMPHORA), UNKNOWN_AMPHORA),),
    )


def test_hostile_text_is_escaped_everywhere():
    seen = view(everything_hostile(), read_error=HOSTILE)
    whole = status_page.render_page(seen, PROCESS, HOSTILE)
    # The search text appears in its field only; the page lists all other objects without it.
    for text in (whole, status_page.render_page(view(everything_hostile()), PROCESS, "")):
        reading = read(text)
        assert reading.tags.count("script") == 1
        assert "img" not in reading.tags
        assert not [name for name in reading.attributes if name.startswith("on")]
        assert b"49" not in text.split(b"</style>")[1].split(b"<script>")[0].replace(b"49%", b"")
        parts = msgspec.json.decode(status_page.encode_parts(seen, text))["parts"]
        assert set(parts) == {"verdict", "notices", "vitals", "failovers", "balancers", "plane", "footer"}
        for part in parts.values():
            assert "<script" not in part
            read(part.encode())
    assert HOSTILE in "".join(read(status_page.render_page(view(everything_hostile()), PROCESS, "")).text)


def test_only_the_pages_own_style_and_script_may_run():
    text = status_page.render_page(view(fleet()), PROCESS).decode()
    for tag in ("style", "script"):
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in status_page.POLICY
    assert "default-src 'none'" in status_page.POLICY
    assert "unsafe" not in status_page.POLICY
    # The page loads no resource, and no attribute has a style that the policy refuses.
    assert not re.findall(r"(?:src|href)=\"(?!data:|#|status\.json|metrics)", text)
    assert " style=" not in text


@pytest.mark.parametrize("found", [None, fleet(), fleet(balancers=(), amphorae=(), processes=())])
def test_the_page_renders_every_snapshot(found):
    seen = View(number=1, fleet=None, read_error="Could not read") if found is None else view(found)
    text = read(status_page.render_page(seen, PROCESS)).text
    assert ("The database does not answer" in " ".join(text)) == (found is None)


def test_alerts_come_first():
    healthy = "".join(read(status_page.render_page(view(fleet()), PROCESS)).text)
    assert "No problems" in healthy
    bad = status_page.render_page(view(fleet(balancers=(balancer(state="ERROR", error="no quota"),))), PROCESS).decode()
    assert "1 problem needs action" in bad
    assert 'data-level="critical"' in bad
    assert bad.index("no quota") < bad.index('id="h-vitals"')


def test_load_balancers_are_found_by_name_address_and_id():
    many = tuple(balancer(number, addresses=(f"198.51.100.{number}",)) for number in range(1, 240))
    seen = view(fleet(balancers=many, amphorae=(machine(5000, of=7),)))
    for query, expected in (("SHOP-17", 11), ("198.51.100.239", 1), (identifier(5000)[-6:], 1), ("nothing", 0)):
        rows = status_page.render_page(seen, PROCESS, query).decode().split('class="balancers"')[-1]
        assert rows.count('data-label="VIP"') == expected, query
    whole = status_page.render_page(seen, PROCESS).decode()
    assert whole.count('data-label="VIP"') == status_page.MAX_ROWS
    assert "139 more" in whole


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "never"),
        (-1, "0 s"),
        (0.01, "0 s"),
        (4.26, "4.3 s"),
        (75, "75 s"),
        (600, "10 min"),
        (7200, "2 h"),
        (5e5, "6 d"),
    ],
)
def test_durations_as_text(seconds, words):
    assert status_page.format_age(seconds) == words


def luminance(colour):
    """Return the relative luminance of WCAG 2.2."""
    digits = colour.lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_colours_have_enough_contrast(scheme):
    """The contrast is at least 4.5 to 1 (WCAG 2.2, 1.4.3) in the light and the dark scheme."""
    style = status_page._STYLE
    day, night = style.split("@media (prefers-color-scheme: dark)", 1)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", day if scheme == "light" else night.split("* {")[0]))
    pairs = [
        (ink, paper) for ink in ("ink", "soft", "ok", "warning", "critical", "busy") for paper in ("paper", "sheet")
    ]
    for ink, paper in [*pairs, ("band-warning-ink", "band-warning"), ("band-critical-ink", "band-critical")]:
        bright, dim = sorted((luminance(found[ink]), luminance(found[paper])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (scheme, ink, paper)
