"""The report page in headless Chromium: bytes, first frame, frames of panning and zooming, and the time to
write it.

The browser is the distribution's (`make browser`); frames are measured inside of it, from
`requestAnimationFrame` to the end of the frame's drawing, and from one frame to the next.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from tests.browser.conftest import start_browser
from tests.browser.pages import many_spans, open_page

from benchmarks.measure import Report
from loadmaster import api
from loadmaster.core.placement import Placement

SUITE = "report"
DEVICES = "V100-16GB, T4, RTX2080, cpu-64GB"
_FRAMES = """
const done = arguments[arguments.length - 1], gantt = window.loadmasterGantt, draws = [], gaps = [];
let last = performance.now(), at = 0;
const step = () => {
  const now = performance.now();
  if (at) { gaps.push(now - last); draws.push(gantt.frame()); }
  last = now;
  if (++at > 120) return done([draws, gaps]);
  if (at < 60) gantt.zoom(at < 30 ? 0.85 : 1 / 0.85, 0.37); else gantt.pan(at < 90 ? 0.05 : -0.05);
  requestAnimationFrame(step); // the frame that zoom or pan asked for is drawn before it
};
gantt.look(0, 1);
requestAnimationFrame(step);
"""


def run(report: Report) -> None:
    """All figures of the suite."""
    gpt = api.plan(api.problem("hf:gpt2", DEVICES, batch=8, seq=1024), budget="100x")
    many = many_spans(100_000)
    with tempfile.TemporaryDirectory() as folder:
        browser = start_browser(Path(folder) / "profile")
        try:
            _measure_page(report, browser, Path(folder), "GPT-2-small training, 4 devices", gpt, 1.5, 1.0)
            _measure_page(report, browser, Path(folder), "100,000 spans, 8 devices", many, 12.0, None)
        finally:
            browser.quit()


def _measure_page(
    report: Report,
    browser: Any,
    folder: Path,
    name: str,
    answer: Placement,
    most_mb: float,
    first_s: float | None,
) -> None:
    path = folder / "page.html"
    api.write_report(answer, path)  # kernels are loaded
    began = time.process_time()
    api.write_report(answer, path)
    write_s = time.process_time() - began
    mb = path.stat().st_size / 1e6
    report.add(SUITE, f"{name}: page", mb, "MB", aim=f"< {most_mb}", reached=mb < most_mb)
    aim = "< 2" if first_s is not None else ""
    report.add(
        SUITE,
        f"{name}: writing it, processor time",
        write_s,
        "s",
        aim=aim,
        reached=write_s < 2 if aim else None,
    )
    first = []
    for _ in range(3):
        open_page(browser, path)
        first.append(browser.execute_script("return loadmasterGantt.first") / 1e3)
    reached = min(first) < first_s if first_s is not None else None
    aim = f"< {first_s:g}" if first_s is not None else ""
    report.add(SUITE, f"{name}: first frame after opening", min(first), "s", aim=aim, reached=reached)
    browser.set_script_timeout(120)
    draws, gaps = browser.execute_async_script(_FRAMES)
    for what, values in (("drawing a frame", draws), ("from one drawn frame to the next", gaps)):
        values = sorted(values)
        middle, late = values[len(values) // 2], values[int(len(values) * 0.95)]
        report.add(SUITE, f"{name}: {what}, median", middle, "ms", aim="< 50", reached=middle < 50)
        report.add(SUITE, f"{name}: {what}, 95th of 100", late, "ms", aim="< 50", reached=late < 50)
