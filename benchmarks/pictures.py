"""python -m benchmarks.pictures: draw the picture of the README anew (about a minute).

GPT-2-XL on three unequal GPUs, none of which holds its training step.
"""

from pathlib import Path

import loadmaster as lm

DEVICES = "RTX4090, RTX3090, T4"


def main() -> None:
    """Plan, and draw what was planned."""
    placement = lm.plan(lm.problem("hf:gpt2-xl", DEVICES, batch=16), pipeline="auto", budget="100x")
    placement.plot().save(Path(__file__).parents[1] / "docs" / "images" / "plan.svg")


if __name__ == "__main__":
    main()
