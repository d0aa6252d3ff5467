"""python -m loadmaster.cli.schemas FOLDER: write the JSON Schema of every noun's file."""

import sys
from pathlib import Path

import msgspec

from loadmaster.core.io import NOUNS, json_schema, write_bytes


def documents() -> dict[str, bytes]:
    """File name -> JSON Schema, as published under docs/schemas."""
    return {
        f"{name}.schema.json": msgspec.json.format(msgspec.json.encode(json_schema(noun)), indent=2) + b"\n"
        for name, noun in NOUNS.items()
    }


def main() -> None:
    """Write them all."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in documents().items():
        write_bytes(data, folder / name)


if __name__ == "__main__":
    main()
