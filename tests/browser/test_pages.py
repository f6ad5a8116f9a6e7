"""Pages as a reader sees them: in a real browser, without scripts or network, light and dark, narrow and on paper."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from piper_ray.model.cluster import Cluster, DeviceKind, Link
from piper_ray.model.instance import Batch, Edge, Instance, Layer, Tmpc
from piper_ray.model.plan import Plan, Stage
from piper_ray.model.schedule import Schedule, ScheduleName
from tests.browser_support import HOW_TO_HAVE_ONE, Browser, browser_path, started
from tests.lengths import long_after
from tests.page_support import written
from tests.simulate_support import GIB, chain, cut


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = browser_path()
    if path is None:
        assert "CI" not in os.environ, HOW_TO_HAVE_ONE
        pytest.skip(HOW_TO_HAVE_ONE)
    with started(path) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """replicas: uneven degrees, on nodes. many: more stages than are shown one by one. chunks: 16 of each
    rank. kinds: stages on two kinds of devices. hostile: too little memory, and names that would do harm if they were
    not escaped."""
    folder = tmp_path_factory.mktemp("pages")
    links = (Link(100 * GIB, 8), Link(GIB))
    uneven = dataclasses.replace(
        chain([3.0, 6.0, 3.0], microbatches=8, degrees=(2,), weights_bytes=GIB / 4), cluster=Cluster(24, 8 * GIB, links)
    )
    names = (
        "<script>document.title='hit'</script>",
        "<img src=x onerror=\"document.title='hit'\">",
        "</style><b>",
        "W" * 900,
    )
    layers = tuple(Layer(i, name, {1: (Tmpc(name, 1.0, 0.0, GIB, GIB),)}) for i, name in enumerate(names))
    edges = tuple(Edge(i, i + 1, 0.0) for i in range(len(names) - 1))
    hostile = Instance(layers, edges, 4, 8, 2 * GIB, GIB, name=names[0])
    hostile_plan = Plan(tuple(Stage((i,), 1, 1, {i: name}) for i, name in enumerate(names)))
    names_of_kinds = ("A100-80", "H100-SXM")
    of_kinds = tuple(Tmpc("plain", 0.01, fixed_bytes=GIB, weights_bytes=GIB, kind=kind) for kind in names_of_kinds)
    kinds = Instance(
        tuple(Layer(i, "decoder layer", {2: of_kinds}) for i in range(12)),
        tuple(Edge(i, i + 1, GIB / 64) for i in range(11)),
        cluster=Cluster.of_kinds([DeviceKind(kind, Cluster(16, 8 * GIB, links)) for kind in names_of_kinds], GIB),
        batch=Batch(16),
    )
    on_kinds = tuple(
        Stage(tuple(range(4 * k, 4 * k + 4)), 4, 2, dict.fromkeys(range(4 * k, 4 * k + 4), "plain"), kind)
        for k, kind in enumerate((names_of_kinds[0], *names_of_kinds[1:] * 2))
    )
    many = chain([0.01 + 0.001 * (i % 3) for i in range(80)], microbatches=16, devices=80, activation_bytes=GIB / 64)
    return {
        "replicas": written(folder / "replicas.html", uneven, cut([1] * 3, [2, 4, 2], 2), "2bw"),
        "many": written(folder / "many.html", many, cut([1] * 80), "1f1b"),
        "chunks": written(
            folder / "chunks.html",
            chain([0.01] * 32, microbatches=16, devices=2, activation_bytes=GIB / 64, fixed_bytes=GIB / 64),
            cut([1] * 32),
            Schedule(ScheduleName.INTERLEAVED, 16),
        ),
        "kinds": written(folder / "kinds.html", kinds, Plan(on_kinds), "1f1b"),
        "hostile": written(folder / "hostile.html", hostile, hostile_plan, "1f1b"),
    }


NAMES = ("replicas", "many", "chunks", "kinds", "hostile")


@pytest.mark.parametrize("name", long_after(2, NAMES))
def test_it_opens_offline_and_without_complaint(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    files = [address for address in browser.requested if not address.startswith("data:image/png")]
    assert files == [pages[name].resolve().as_uri()]
    assert browser.complaints == []
    for section in ("figures", "findings", "placement", "stages", "timeline", "memory", "ranks", "comparison"):
        assert browser.value(f"document.querySelector('section#{section}').getBoundingClientRect().height") > 30
        assert len(browser.value(f"document.querySelector('section#{section}').innerText")) > 20
    for picture in ("placement", "timeline", "memory"):
        assert browser.value(f"document.querySelector('section#{picture} svg').getBoundingClientRect().width") > 500


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("width", "media"), long_after(3, [(1200, ""), (390, ""), (680, "print"), (700, ""), (420, "")])
)
def test_nothing_sticks_out(browser: Browser, pages: dict[str, Path], name: str, width: int, media: str) -> None:
    browser.open(pages[name], width=width, media=media)
    assert browser.value("document.documentElement.scrollWidth") <= width
    if media == "print" or width == 1200:  # elsewhere a table scrolls by itself
        assert browser.value("[...document.querySelectorAll('.wide')].every(x => x.scrollWidth <= x.clientWidth + 1)")


def test_each_kind_has_a_colour_and_its_nodes_have_frames(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["kinds"])
    of_each = "[...document.querySelectorAll('#placement svg')].map(svg => svg.querySelectorAll('rect.node').length)"
    assert browser.value(of_each) == [2, 2]
    fill = "getComputedStyle(svg.querySelector('rect:not(.node)')).fill"
    assert len({*browser.value(f"[...document.querySelectorAll('#placement svg')].map(svg => {fill})")}) == 2


_TEXTS_OUTSIDE = """
[...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const own = text.getBoundingClientRect();
        return Math.max(box.left - own.left, own.right - box.right, box.top - own.top, own.bottom - box.bottom) > 1;
    }).map(text => text.textContent);
})
"""


@pytest.mark.parametrize("name", NAMES)
def test_pictures_hold_their_texts(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    assert browser.value(_TEXTS_OUTSIDE) == []


_CONTRASTS = """
(() => {
    const parts = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => parts(colour).slice(0, 3).map(x => x / 255).map(
        x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
    ).reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if ((parts(colour)[3] ?? 1) > 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const contrast = (one, other) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const found = [];
    const texts = 'h1, h2, p, li, dt, dd, td, th, .head, .more, data, figcaption, footer';
    for (const text of document.querySelectorAll(texts))
        found.push([contrast(getComputedStyle(text).color, ground(text)), text.tagName + ' ' + text.className]);
    for (const group of document.querySelectorAll('svg.placement g')) {
        const cell = group.querySelector('rect'), text = group.querySelector('text');
        if (text) found.push([contrast(getComputedStyle(text).fill, getComputedStyle(cell).fill), 'cell']);
    }
    for (const text of document.querySelectorAll('svg.memory text'))
        found.push([contrast(getComputedStyle(text).fill, ground(text)), 'memory']);
    return found.sort((a, b) => a[0] - b[0])[0];
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", long_after(2, NAMES))
def test_texts_are_readable_in_the_light_and_in_the_dark(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, tmp_path: Path
) -> None:
    browser.open(pages[name], scheme=scheme)
    least, where = browser.value(_CONTRASTS)
    assert least >= 4.5, where  # as WCAG 2 asks of texts
    browser.picture(tmp_path / "page.png")
    (brightness,) = ImageStat.Stat(Image.open(tmp_path / "page.png").convert("L")).mean
    assert (brightness > 200.0) if scheme == "light" else (brightness < 90.0)


@pytest.mark.parametrize("name", long_after(2, NAMES))
def test_paper_is_white_whatever_the_reader_prefers(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], scheme="dark", media="print")
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    least, where = browser.value(_CONTRASTS)
    assert least >= 4.5, where
    assert browser.value("[...document.querySelectorAll('details')].every(x => x.getBoundingClientRect().height === 0)")
    browser.look(scheme="dark")
    document = browser.printed()
    assert document.startswith(b"%PDF-")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", document)) <= 12


def test_short_words_stay_whole(browser: Browser, pages: dict[str, Path]) -> None:
    """Long names break anywhere; "memory" and figures do not."""
    lines = "getComputedStyle(cell).lineHeight"
    tall = f"""[...document.querySelectorAll('td.binds, #rank-table td.number')].filter(cell => {{
        const range = document.createRange();
        range.selectNodeContents(cell.querySelector('data') ?? cell);
        return cell.textContent && !/[, ]/.test(cell.textContent)
            && range.getBoundingClientRect().height > 1.5 * parseFloat({lines});
    }}).map(cell => cell.textContent)"""
    for name in NAMES:
        browser.open(pages[name])
        assert browser.value(tall) == []


def test_names_do_no_harm(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.value("document.querySelectorAll('script, img, b, iframe').length") == 0
    assert browser.value("document.title").startswith("<script>document.title='hit'</script>: a plan of 4 stages")
    assert "too little memory" in browser.value("document.querySelector('section#findings').innerText")
    assert browser.value("document.querySelector('section#faults').getBoundingClientRect().height") > 50


def test_what_is_grouped_opens_on_demand(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    shown = "document.querySelector('#all-stages').checkVisibility()"
    assert browser.value(shown) is False
    browser.value("document.querySelector('section#stages summary').click()")
    assert browser.value(shown) is True
    assert browser.value("document.querySelectorAll('#all-stages tbody tr').length") == 80


@pytest.mark.long
def test_colours_of_the_timeline_follow_the_page(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """Its idle grey and its texts are the page's; passes keep their colours."""
    seen = {}
    for scheme in ("light", "dark"):
        browser.open(pages["replicas"], scheme=scheme)
        browser.picture(tmp_path / "page.png")
        box = browser.value(
            "(({left, top, right, bottom}) => [left, top + scrollY, right, bottom + scrollY])"
            "(document.querySelector('section#timeline svg').getBoundingClientRect())"
        )
        picture = Image.open(tmp_path / "page.png").convert("RGB").crop(tuple(map(round, box)))
        seen[scheme] = {colour: count for count, colour in picture.getcolors(picture.width * picture.height) or []}
    forward, backward, idle_light, idle_dark = (0, 114, 178), (213, 94, 0), (227, 227, 227), (58, 64, 72)
    white, black = (255, 255, 255), (20, 23, 27)
    assert {forward, backward, idle_light, white} <= seen["light"].keys()
    assert {forward, backward, idle_dark, black} <= seen["dark"].keys()
    assert idle_light not in seen["dark"]
    assert seen["dark"].get(white, 0) < seen["light"][white] / 20  # numbers in passes stay white
