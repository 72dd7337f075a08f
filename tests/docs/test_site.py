"""The built site: every link leads somewhere, nothing comes from the network, a browser shows it.

`make docs` builds the site and runs these tests on it. Without ``SNAPMLA_SITE`` there is no site to
look at. The tests in a browser need Chromium (Debian's package `chromium`) and are skipped without.
"""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

SITE = Path(os.environ.get("SNAPMLA_SITE", "build/site")).resolve()
pytestmark = pytest.mark.skipif(
    "SNAPMLA_SITE" not in os.environ, reason="SNAPMLA_SITE is not set; make docs builds and checks"
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")
WIDTHS = {"phone": 390, "desktop": 1280}

PICTURES = {
    "00_problem": 2,
    "10_stage0": 1,
    "20_stage1": 2,
    "30_stage2": 3,
    "40_stage3": 1,
    "50_performance": 2,
    "60_guarantees": 1,
    "70_your_loop": 1,
}


class Page(HTMLParser):
    """Links, sources and anchors of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.sources: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.update(filter(None, (found.get("id"), found.get("name"))))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        for name in ("src", "href"):
            if tag in ("script", "img", "link", "iframe", "source") and found.get(name):
                self.sources.append(str(found[name]))


@functools.cache
def read(path: Path) -> Page:
    return Page(path.read_text())


def pages() -> list[Path]:
    return sorted(path for path in SITE.glob("*.html"))


def test_every_page_is_there():
    names = {path.stem for path in pages()}
    expected = {*PICTURES, "index", "exercises", "symbols", "differences", "troubleshooting"}
    assert expected | {"performance-log", "search", "genindex"} <= names


def test_every_link_leads_somewhere():
    broken = []
    for page in pages():
        for link in read(page).links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                broken.append((page.name, link))
            elif parts.fragment and target.suffix == ".html":
                if unquote(parts.fragment) not in read(target).anchors | {""}:
                    broken.append((page.name, link))
    assert not broken


def test_nothing_is_loaded_from_the_network():
    for page in pages():
        for source in read(page).sources:
            assert not urlsplit(source).netloc, (page.name, source)
            if urlsplit(source).path and not source.startswith("data:"):
                assert (page.parent / unquote(urlsplit(source).path)).is_file(), source
    for style in SITE.glob("_static/**/*.css"):
        remote = re.findall(r"url\([\"']?(https?://[^)]+)|@import[^;]*https?://", style.read_text())
        assert not remote, style


def test_chapters_show_their_pictures_and_outputs():
    for name, count in PICTURES.items():
        text = (SITE / f"{name}.html").read_text()
        assert text.count('<svg role="img" aria-label="') == count, name
        assert "cell_output" in text and "Traceback (most recent call last)" not in text, name


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site, and the page that the browser tests drive."""

    harness = ""

    def do_GET(self) -> None:
        if not self.path.startswith("/harness"):
            super().do_GET()
            return
        body = type(self).harness.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(url: str, tmp_path: Path, *options: str, width: int = 1280) -> str:
    """Open a page in Chromium without a screen and give its document when it has settled."""
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--virtual-time-budget=20000",
        *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []),
        *options,
        "--dump-dom",
        url,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


# Opens every page in a frame of one width and writes what it sees as JSON.
HARNESS = """<!doctype html><meta charset="utf-8"><pre id="report"></pre><script>
const names = %s, width = %d, report = {};
function coloursOf(page, picture) {
  const drawn = [...picture.querySelectorAll("use, path")];
  return [...new Set(drawn.map((part) => page.defaultView.getComputedStyle(part).fill))];
}
function look(page) {
  const pictures = [...page.querySelectorAll("svg[role=img]")];
  return {
    textColour: page.defaultView.getComputedStyle(page.body).color,
    pageColour: page.defaultView.getComputedStyle(page.body).backgroundColor,
    pictures: pictures.map((picture) => {
      const box = picture.getBoundingClientRect();
      return { width: box.width, height: box.height, colours: coloursOf(page, picture) };
    }),
  };
}
async function visit(name) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
  const errors = [];
  await new Promise((done) => {
    frame.onload = done;
    frame.src = "/" + name;
    document.body.append(frame);
    frame.contentWindow.addEventListener("error", (event) => errors.push(String(event.message)));
  });
  const page = frame.contentDocument;
  report[name] = {
    title: page.title,
    heading: (page.querySelector("h1") || {}).textContent || "",
    overflow: page.documentElement.scrollWidth - width,
    brokenImages: [...page.images].filter((i) => i.complete && !i.naturalWidth).length,
    errors,
    themes: {},
  };
  for (const theme of ["light", "dark"]) {
    page.body.dataset.theme = theme;  // what the theme's own switch does
    report[name].themes[theme] = look(page);
  }
  frame.remove();
}
(async () => {
  for (const name of names) await visit(name);
  document.getElementById("report").textContent = JSON.stringify(report);
})();
</script>"""


@contextlib.contextmanager
def harness_at(width: int) -> Iterator[None]:
    Quiet.harness = HARNESS % (json.dumps([path.name for path in pages()]), width)
    yield
    Quiet.harness = ""


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("kind", WIDTHS)
def test_every_page_loads_and_fits(kind, address, tmp_path):
    width = WIDTHS[kind]
    with harness_at(width):
        document = browse(f"{address}/harness", tmp_path, width=width + 40)
    found = re.search(r'<pre id="report">(.*?)</pre>', document, re.DOTALL)
    assert found and found[1], document[-2000:]
    report = json.loads(html.unescape(found[1]))
    assert set(report) == {path.name for path in pages()}
    for name, page in report.items():
        assert page["title"] and (page["heading"] or name == "search.html"), name
        assert not page["errors"] and not page["brokenImages"], (name, page)
        assert page["overflow"] <= 0, f"{name} is {page['overflow']} pixels too wide on a {kind}"
        light, dark = page["themes"]["light"], page["themes"]["dark"]
        assert light["pageColour"] != dark["pageColour"], name
        assert len(light["pictures"]) == PICTURES.get(name.removesuffix(".html"), 0), name
        for theme in (light, dark):
            for picture in theme["pictures"]:
                assert 200 < picture["width"] <= width and picture["height"] > 40, (name, picture)
                assert theme["textColour"] in picture["colours"], (name, picture)


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("place", ("server", "file"))
def test_search_finds_what_the_pages_say(place, address, tmp_path):
    base = address if place == "server" else SITE.as_uri()
    document = browse(f"{base}/search.html?q=sigma", tmp_path)
    results = document.partition('id="search-results"')[2]
    assert "30_stage2.html" in results, results[:1500]
    nothing = browse(f"{base}/search.html?q=xylophone", tmp_path)
    assert "30_stage2.html" not in nothing.partition('id="search-results"')[2]
