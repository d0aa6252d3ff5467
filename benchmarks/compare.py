"""python -m benchmarks.compare OLD.json NEW.json: how two result files differ, figure by figure."""

import json
import sys
from pathlib import Path


def main() -> None:
    """Print new / old for every figure in both."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m benchmarks.compare OLD.json NEW.json")
    old, new = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])
    if old["machine"]["processor"] != new["machine"]["processor"]:
        print(f"different processors: {old['machine']['processor']} and {new['machine']['processor']}")
    before = {(f["suite"], f["name"]): f for f in old["figures"]}
    for figure in new["figures"]:
        known = before.get((figure["suite"], figure["name"]))
        if known is not None and known["value"]:
            ratio = figure["value"] / known["value"]
            change = f"{known['value']:10.4g} -> {figure['value']:10.4g} {figure['unit']:6}"
            print(f"{figure['name']:70} {change} {ratio:6.2f}x")


if __name__ == "__main__":
    main()
