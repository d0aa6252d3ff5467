"""Options that several verbs share, so that a word means the same everywhere. Nothing heavy is imported."""

from typing import Annotated

import typer

Source = Annotated[
    str,
    typer.Argument(help="A graph: a file (own JSON, msr, pipedream, node-link) or gen:FAMILY:OPS[:SEED]."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        "-d",
        help="A cluster: '2xA100-80GB, cpu-64GB', a .toml or a .json file. Default: the source's own.",
    ),
]
Algorithm = Annotated[str, typer.Option("--algorithm", "-a", help="See: loadmaster algorithms.")]
BudgetText = Annotated[
    str, typer.Option("--budget", "-b", help="Seconds (10s) or a count of scored plans (2000x, repeatable).")
]
Seed = Annotated[int, typer.Option("--seed", help="For algorithms that draw.")]
ObjectiveName = Annotated[
    str | None, typer.Option("--objective", help="step or throughput. Default: the source's own.")
]
LinksName = Annotated[
    str | None,
    typer.Option("--links", help="shared, parallel, half-duplex or host. Default: the source's own."),
]
SplitName = Annotated[
    str | None, typer.Option("--split", help="chain, convex or free: what a throughput plan must look like.")
]
LoadName = Annotated[
    str, typer.Option("--load", help="sum, max2 or max3: how loads add up under links=host.")
]
Optimizer = Annotated[
    str | None,
    typer.Option("--optimizer", help="sgd, momentum, adam, adamw or adafactor: state of the parameters."),
]
Precision = Annotated[str, typer.Option("--precision", help="fp32 or mixed (16-bit weights, fp32 master).")]
Pin = Annotated[
    list[str] | None, typer.Option("--pin", help="OP_OR_MODULE=DEVICE, e.g. lm_head=gpu0. Repeatable.")
]
Reserve = Annotated[str, typer.Option("--reserve", help="Memory to keep free on every device, e.g. 1GiB.")]
Format = Annotated[
    str | None, typer.Option("--format", help="Format of the source, if it is not to be recognised.")
]
MaxBytes = Annotated[str, typer.Option("--max-bytes", help="Refuse larger files.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
Out = Annotated[
    str | None, typer.Option("--out", "-o", help="Save the answer with all it needs (.json, .json.gz).")
]
Trace = Annotated[
    str | None, typer.Option("--trace", help="Write the timeline as a Chrome trace (Perfetto).")
]
