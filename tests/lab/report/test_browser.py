"""The page in a real browser: no errors, nothing loaded, marks drawn, tables sorted by a click."""

import html
import json
import re
import shutil
import subprocess

import pytest

from vllm_semantic_sched.lab.report.content import (
    Boxes,
    Chart,
    Line,
    Page,
    Points,
    Table,
    grouped_values,
)
from vllm_semantic_sched.lab.report.gantt import gantt_chart
from vllm_semantic_sched.lab.report.page import write_page
from vllm_semantic_sched.policy.record.spans import HELD, Span, level_color

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

LINE, POINT, BOX, LAST = "#ff00ff", "#00ffff", "#aa5500", "#0055aa"
SPANS = [
    Span("a", 4, arrival=0.0, start=1.0, end=2.0, end_kind="swap"),
    Span("b", 0, arrival=1.5, start=3.0, end=4.0, end_kind=HELD),
    Span("b", 0, arrival=1.5, start=2.0, end=5.0, end_kind="finish"),
    Span("a", 4, arrival=0.0, start=5.0, end=8.0, end_kind="finish"),
]
ROWS = [["ten", 10.0], ["nine", 9.5], ["none", None], ["hundred", 100.0]]

# Before the page's own scripts: collects what goes wrong.
LISTEN = """<script>
window.problems = [];
const report = console.error;
console.error = (...words) => { problems.push(words.join(" ")); report(...words); };
addEventListener("error", (event) => problems.push(String(event.message)));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
</script>"""
# After them: clicks on the second header, once and twice, and reads every canvas.
LOOK = """<script>
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const column = () => all("tbody tr").map((row) => row.cells[0].innerText);
function canvases(root) {
  const shadows = all("*", root).map((element) => element.shadowRoot).filter(Boolean);
  return [...all("canvas", root), ...shadows.flatMap(canvases)];
}
function colors(chart) {
  const counts = {};
  for (const canvas of canvases(chart)) {
    if (!canvas.width || !canvas.height) continue;
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let n = 0; n < pixels.length; n += 4) {
      if (pixels[n + 3] < 255) continue;
      const hex = [...pixels.slice(n, n + 3)].map((c) => c.toString(16).padStart(2, "0")).join("");
      counts["#" + hex] = (counts["#" + hex] || 0) + 1;
    }
  }
  return counts;
}
setTimeout(() => {
  const button = document.querySelectorAll("th button")[1];
  const found = { problems, charts: [], sorted: [] };
  for (let n = 0; n < 2; n++) { button.click(); found.sorted.push(column()); }
  for (const chart of document.querySelectorAll(".chart")) found.charts.push(colors(chart));
  found.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  const result = document.createElement("pre");
  result.id = "found";
  result.textContent = JSON.stringify(found);
  document.body.append(result);
}, 4000);
</script>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the browser saw in a page with every kind of mark."""
    folder = tmp_path_factory.mktemp("page")
    marks = [
        Line("line", [0, 1, 2], [1, 3, 2], LINE),
        Points("points", [(1.0, 1.0, "one"), (1.5, 2.0, "two")], POINT),
        Boxes("boxes", [(0.2, 0.8, 0.0, 0.5, "box")], BOX),
    ]
    bars = grouped_values("Bars", "s", ["0", "all"], {"ours": [2.0, 3.0]}, {"ours": LAST})
    dots = grouped_values("Dots", "s", ["0", "all"], {"ours": [1.0, 20.0]}, {"ours": LAST})
    parts = [
        Table("Table", ["name", "value"], ROWS),
        Chart("Marks", "x", "y", marks),
        bars,
        dots,
        gantt_chart("Seats", SPANS, requests=2),
    ]
    path = write_page(Page("Page", "A page.", parts, {"key": 1}, {}), folder)
    text = path.read_text(encoding="utf-8").replace("<head>", f"<head>{LISTEN}", 1)
    path.write_text(text.replace("</body>", f"{LOOK}</body>"), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000"]
    command += ["--window-size=1200,1400", "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240)
    match = re.search(r'<pre id="found">(.*?)</pre>', shown.stdout, re.DOTALL)
    assert match, shown.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


def test_nothing_goes_wrong_and_nothing_is_loaded(found):
    assert found["problems"] == []
    assert found["loaded"] == []


def test_every_mark_is_drawn(found):
    marks, bars, dots, gantt = found["charts"]
    assert all(marks.get(color, 0) > 10 for color in (LINE, POINT, BOX))
    assert bars.get(LAST, 0) > 1000
    assert 100 < dots.get(LAST, 0) < 1000
    # Level 4 had a seat for four seconds, level 0 for three, in one of which it was held.
    routine, urgent = (gantt.get(level_color(level), 0) for level in (4, 0))
    assert routine > urgent > 1000
    assert routine / urgent == pytest.approx(2.0, rel=0.15)


def test_header_click_sorts_and_second_click_reverses(found):
    assert found["sorted"] == [
        ["nine", "ten", "hundred", "none"],
        ["hundred", "ten", "nine", "none"],
    ]
