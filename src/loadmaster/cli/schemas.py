"""python -m loadmaster.cli.schemas FOLDER: write the JSON Schema of every noun's file and of `fit`."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from loadmaster.capacity.answer import SCHEMA_VERSION, Fit
from loadmaster.core.io import NOUNS, json_schema, write_bytes


def documents() -> dict[str, bytes]:
    """File name -> JSON Schema, as published under docs/schemas."""
    schemas = {name: json_schema(noun) for name, noun in NOUNS.items()} | {"fit": _fit_schema()}
    return {
        f"{name}.schema.json": msgspec.json.format(msgspec.json.encode(schema), indent=2) + b"\n"
        for name, schema in schemas.items()
    }


def _fit_schema() -> dict[str, Any]:
    """What `loadmaster fit --json` prints."""
    (ref,), defs = msgspec.json.schema_components([Fit], ref_template="#/$defs/{name}")
    defs["Fit"]["properties"]["loadmaster"] = {"const": "fit"}
    defs["Fit"]["properties"]["schema"] = {"const": SCHEMA_VERSION}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Loadmaster Fit"}
    return {**head, **ref, "$defs": defs}


def main() -> None:
    """Write them all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in documents().items():
        write_bytes(data, folder / name)


if __name__ == "__main__":
    main()
