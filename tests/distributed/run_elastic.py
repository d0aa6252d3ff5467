"""A script for torchrun: trains with checkpoints, and rank 1 dies once in the middle.

python -m torch.distributed.run --nproc-per-node 2 --max-restarts 1 -m tests.distributed.run_elastic FOLDER
"""

import os
import sys
from pathlib import Path

import torch

import loadmaster as lm
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import as_batch, pipeline_placement, whole_batch
from tests.distributed.run_models import Net, sgd, square

STEPS, DIES_AFTER = 4, 2


def main(folder: Path) -> None:
    """Go on from the newest checkpoint, to the end."""
    torch.manual_seed(2)
    built = Example(Net(), (torch.randn(4, 16),), loss=square)
    placement, batch = pipeline_placement(built, 2, 2), as_batch(whole_batch(built, 2))
    with lm.launch(placement, built.model, loss=square, optimizer=sgd, timeout=30.0) as run:
        if any(folder.glob("step-*")):
            run.load(folder)
        begun = run.steps_done
        while run.steps_done < STEPS:
            run.step(batch)
            run.save(folder)
            is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if is_first and run.rank == 1 and run.steps_done == DIES_AFTER:
                os._exit(9)
        if run.rank == 0:
            print(f"from step {begun} to {run.steps_done}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
