"""Pages to be looked at, and what a browser says of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from loadmaster import api
from loadmaster.core.graph import Phase
from loadmaster.core.placement import Placement
from loadmaster.core.timeline import Timeline, TimelineOrigin
from loadmaster.graph.build import GraphBuilder
from tests.builders import plan_on, problem_of, star_cluster

HOSTILE = (
    "</script><img onerror=window.hit=1 src=x>",
    "\"'><svg onload=window.hit=1>",
    "line\u2028end\u2029</title><script>window.hit=1</script>",
    "]]>--><!-- {{ 7*7 }} \\u003c \x1b[31m",
)
DEVICE = "<b onclick=window.hit=1>gpu&amp;"


def answer_of(problem: Any, device: list[int]) -> Placement:
    return api.plan(problem, algorithm=plan_on(device))


def two_devices() -> Placement:
    """Six ops of one second on two devices, in two modules, with a tensor that crosses."""
    builder = GraphBuilder("six ops")
    for op in range(6):
        builder.op(f"op{op}", module=f"net.part{op // 3}", kind="matmul", workspace_bytes=3)
        if op:
            builder.use(builder.tensor(op - 1, 2), op)
    return answer_of(problem_of(builder.build(), star_cluster(2, memory=100), 1.0), [0, 0, 0, 1, 1, 1])


def hostile() -> Placement:
    """Names that are markup, on a device that is markup, in a graph that is markup."""
    from dataclasses import replace

    builder = GraphBuilder(HOSTILE[0])
    for at, name in enumerate(HOSTILE):
        builder.op(name, module=f"{HOSTILE[1]}.m{at}", kind=HOSTILE[2])
        if at:
            builder.use(builder.tensor(at - 1, 2), at)
    cluster = star_cluster(2, memory=100)
    cluster = replace(cluster, name=HOSTILE[1], device_name=(DEVICE, HOSTILE[0]), kind_name=(HOSTILE[1],))
    return answer_of(problem_of(builder.build(), cluster, 1.0), [0, 0, 1, 1])


def measured_of(placement: Placement, factor: float = 1.5) -> Timeline:
    """The predicted timeline, slower: as a run would write it."""
    from dataclasses import replace

    assert placement.plan is not None
    seen = api.simulate(placement.problem, placement.plan)
    return replace(
        seen, origin=TimelineOrigin.MEASURED, start_s=seen.start_s * factor, end_s=seen.end_s * factor
    )


def write(placement: Placement, folder: Path, **more: Any) -> Path:
    path = folder / "report.html"
    api.write_report(placement, path, **more)
    return path


def open_page(browser: Any, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
    """Open a file at a size, in light or in dark, with its logs empty before."""
    for log in ("browser", "performance"):
        browser.get_log(log)
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get(path.as_uri())


def console(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser")]


def requests(browser: Any) -> list[str]:
    """Addresses of everything that pages asked for; the browser's own page of new tabs does not count."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    found = [each["request"]["url"] for each in asked if not each["documentURL"].startswith("chrome")]
    return [url for url in found if not url.startswith("data:")]


def many_spans(num: int) -> Placement:
    """A plan with about so many spans: short ops in chains on eight devices, each with neighbours
    elsewhere."""
    rng = np.random.default_rng(0)
    builder = GraphBuilder(f"{num} spans")
    devices = 8
    num_ops = int(num * 0.8)
    for op in range(num_ops):
        builder.op(
            f"layer{op // 100}.block{op % 100 // 10}.op{op}", module=f"layer{op // 100}.block{op % 100 // 10}"
        )
        if op >= devices:
            builder.use(builder.tensor(op - devices, 2), op)
        if op >= devices + 1 and rng.random() < 0.27:
            tensor = builder.tensor(op - devices - 1, 1)
            builder.use(tensor, op)
    graph = builder.build()
    assert (graph.phase == Phase.FORWARD).all()
    problem = problem_of(graph, star_cluster(devices, memory=10**9, rate=100.0), 1.0)
    return answer_of(problem, [op % devices for op in range(num_ops)])
