"""python -m loadmaster.cli.schemas FOLDER: write the JSON Schema of every noun's file, of fit and of run."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.core.answers.fit_answer import SCHEMA_VERSION as FIT
from loadmaster.core.answers.fit_answer import Fit
from loadmaster.core.answers.run_report import SCHEMA_VERSION as RUN
from loadmaster.core.answers.run_report import PipelineRan, Ran
from loadmaster.core.answers.strategy_report import SCHEMA_VERSION as STRATEGY_RUN
from loadmaster.core.answers.strategy_report import StrategyRan
from loadmaster.core.answers.ways_answer import SCHEMA_VERSION as WAYS
from loadmaster.core.answers.ways_answer import Ways
from loadmaster.core.files import write_bytes
from loadmaster.core.io import NOUNS, json_schema


def list_schemas() -> dict[str, bytes]:
    """File name -> JSON Schema, as published under docs/schemas."""
    answers = {
        "fit": _answer_schema(Fit, "fit", FIT),
        "run": _answer_schema(Ran, "run", RUN),
        "pipeline-run": _answer_schema(PipelineRan, "pipeline run", RUN),
        "ways": _answer_schema(Ways, "ways", WAYS),
        "strategy-run": _answer_schema(StrategyRan, "strategy run", STRATEGY_RUN),
    }
    schemas = {name: json_schema(noun) for name, noun in NOUNS.items()} | answers
    return {
        f"{name}.schema.json": msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"
        for name, schema in schemas.items()
    }


def _answer_schema(answer: type, word: str, version: int) -> dict[str, Any]:
    """What a verb prints under `--json`."""
    (ref,), defs = msgspec.json.schema_components([answer], ref_template="#/$defs/{name}")
    properties = defs[answer.__name__]["properties"]
    properties["loadmaster"], properties["schema"] = {"const": word}, {"const": version}
    title = f"Loadmaster {answer.__name__}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **ref, "$defs": defs}


def main() -> None:
    """Write them all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in list_schemas().items():
        write_bytes(data, folder / name)


if __name__ == "__main__":
    main()
