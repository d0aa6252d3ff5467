"""Options that several verbs share, so that a word means the same everywhere. Nothing heavy is imported."""

from typing import Annotated

import typer

MEASURE = "30s"  # how long to measure, where --measure does not say

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A graph: a file (own JSON, msr, piper, pipedream, node-link, ONNX, .pt2, OpenVINO IR) or"
        " gen:FAMILY:OPS[:SEED], e.g. gen:transformer:1500; or a model: hf:NAME, zoo:NAME, keras:NAME,"
        " a SavedModel folder, file.py:function.",
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "-d",
        metavar="CLUSTER",
        help="'2xA100-80GB, cpu-64GB', a .toml or a saved .json file. Default: the source's own.",
    ),
]
Algorithm = Annotated[
    str, typer.Option("--algorithm", "-a", metavar="NAME", help="A name from: loadmaster algorithms.")
]
BudgetText = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="Seconds (10s), or a count of plans to try (2000x: the same answer every time).",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of random numbers; 0 or more.")]
ObjectiveName = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="NAME",
        help="step (one step's time) or throughput (pipelined time per sample). Default: the source's own.",
    ),
]
LinksName = Annotated[
    str | None,
    typer.Option(
        "--links",
        metavar="NAME",
        help="How transfers contend: shared, parallel, half-duplex or host. Default: the source's own.",
    ),
]
SplitName = Annotated[
    str | None,
    typer.Option(
        "--split", metavar="NAME", help="What a throughput plan must look like: chain, convex or free."
    ),
]
PipelineName = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        metavar="auto|SCHEDULE:N",
        help="auto: compare pipelines of micro-batches with other plans, for a step of the whole batch."
        " 1f1b:8, gpipe:8: stages with room for 8 micro-batches, of which the source is one;"
        " also zb-h1:8, interleaved:8x2.",
    ),
]
Order = Annotated[
    str,
    typer.Option(
        "--order",
        metavar="ORDER",
        help="captured: run ops in the order of the graph, as torch does; free: in the plan's order.",
    ),
]
Evaluate = Annotated[
    str,
    typer.Option(
        "--evaluate",
        metavar="HOW",
        help="simulated, or measured: run every plan of a captured model on this machine.",
    ),
]
Repeats = Annotated[
    int, typer.Option("--repeats", metavar="N", help="Timed steps of each plan with --evaluate measured.")
]
Spill = Annotated[
    str | None,
    typer.Option(
        "--spill",
        metavar="DEVICE",
        help="host: weights and their state may stay in host memory while their ops run on a GPU.",
    ),
]
LoadName = Annotated[
    str | None,
    typer.Option("--load", metavar="NAME", help="How loads add up with --links host: sum, max2 or max3."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="Whose state to count per weight: sgd, momentum, adam, adamw or adafactor.",
    ),
]
Batch = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Samples in a step of a captured model (8).")
]
Seq = Annotated[
    int | None, typer.Option("--seq", metavar="N", help="Tokens in a sample of a captured model (512).")
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="NAME",
        help="fp32, bf16-mixed, fp16-mixed (autocast of a captured model; else 16-bit weights with an fp32"
        " master copy) or bf16.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="KIND",
        help="Which kernels to count for a captured model: cpu or cuda. Default: the kind of the devices.",
    ),
]
Capture = Annotated[
    str | None,
    typer.Option(
        "--capture",
        metavar="PATH",
        help="How to capture a model: joint, traced or estimated. Default: the first that works.",
    ),
]
Accumulation = Annotated[
    int | None,
    typer.Option(
        "--accumulation", metavar="N", help="Forward and backward passes before each optimizer update (1)."
    ),
]
Ranges = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="NAME=LOW:HIGH",
        help="Sizes at which the model must run the same ops: batch=2:64, seq=2:1024. May be repeated.",
    ),
]
Assume = Annotated[
    float | None,
    typer.Option(
        "--assume",
        metavar="VALUE",
        help="Value to assume for values that capture cannot know (1: conditions hold).",
    ),
]
Pin = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="OP=DEVICE",
        help="Keep an op or a module on a device: lm_head=gpu0. May be repeated.",
    ),
]
Reserve = Annotated[
    str, typer.Option("--reserve", metavar="SIZE", help="Memory to keep free on every device, e.g. 1GiB.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Read the file as own, msr, piper, pipedream, nodelink, onnx, pt2 or openvino. Default:"
        " detected.",
    ),
]
Measure = Annotated[
    str | None,
    typer.Option(
        "--measure",
        metavar="[SECONDS]",
        help="Time the ops of a captured model on this machine's devices, for at most that long (30s).",
    ),
]
Costs = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="NAME",
        help="roofline (vendors' peaks), measured, or auto: measured for 2 s where all devices are here.",
    ),
]
Database = Annotated[
    str | None,
    typer.Option("--database", metavar="FILE", help="File of measured costs. Default: in your cache folder."),
]
MaxBytes = Annotated[str, typer.Option("--max-bytes", metavar="SIZE", help="Refuse larger files.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, everything else on stderr.")
]
Out = Annotated[
    str | None,
    typer.Option("--out", "-o", metavar="FILE", help="Save the plan and its problem (.json, .json.gz)."),
]
Trace = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", help="Write the timeline as a Chrome trace; opens at ui.perfetto.dev."
    ),
]
