"""A process that knows OpenVINO: it writes a model, or compiles one by the affinities of a file.

    affinities.py write MODEL.xml
    affinities.py compile MODEL.xml AFFINITIES.json

It says as JSON what OpenVINO said: the nodes it wrote, or how far HETERO's answer is from the CPU's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13


def write(path: str) -> dict[str, Any]:
    """Two layers with a branch that both feed: 2 results, one of them in the middle."""
    values = np.random.default_rng(0)
    given = opset13.parameter([4, 16], np.float32, name="tokens")
    hidden = given
    outputs = []
    for layer in range(3):
        weight = opset13.constant(
            values.normal(size=(16, 16)).astype(np.float32), name=f"layers.{layer}.weight"
        )
        hidden = opset13.matmul(hidden, weight, False, False, name=f"layers.{layer}/matmul")
        hidden = opset13.relu(hidden, name=f"layers.{layer}/relu")
        outputs.append(hidden)
    both = opset13.add(outputs[0], outputs[2], name="sum")
    openvino.save_model(openvino.Model([both, outputs[1]], [given], "three layers"), path, False)
    return {}


def compile_by(path: str, affinities: str) -> dict[str, Any]:
    """As docs/report.md says."""
    document = json.loads(Path(affinities).read_text(encoding="utf-8"))
    core = openvino.Core()
    plain = core.compile_model(core.read_model(path), "CPU")
    model = core.read_model(path)
    for op in model.get_ordered_ops():
        name = op.get_friendly_name()
        if name not in document["affinities"]:  # a Result
            name = op.input_value(0).get_node().get_friendly_name()
        op.get_rt_info()["affinity"] = document["affinities"][name]
    try:
        split = core.compile_model(model, document["device"])
    except RuntimeError as problem:
        return {"refused": str(problem)}
    batch = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
    pairs = zip(plain(batch).values(), split(batch).values(), strict=True)
    return {
        "off": [float(np.abs(a - b).max()) for a, b in pairs],
        "devices": split.get_property("EXECUTION_DEVICES"),
    }


if __name__ == "__main__":
    print(json.dumps({"write": write, "compile": compile_by}[sys.argv[1]](*sys.argv[2:])))
