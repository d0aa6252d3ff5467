"""lm.launch of strategies: files, checkpoints, the command line, torchrun, and what is refused."""

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import loadmaster as lm
from loadmaster.cluster.parse import parse_cluster
from loadmaster.core.errors import InputError, PlanError
from loadmaster.core.strategy import Mode, OpGroup, Strategy, Sync
from loadmaster.core.strategy_answer import StrategyAnswer
from loadmaster.modules.checkpoint import Checkpoint
from loadmaster.runtime.distributed.strategy.layout import layout_of_strategy
from loadmaster.zoo.example import Example
from tests.distributed.pipelines import largest_difference
from tests.distributed.run_models import Net, Rows, adamw, square
from tests.distributed.strategies import Part, strategy_answer, train_whole

AR, PS = Sync.ALLREDUCE, Sync.PS


def _example(batch: int = 8) -> Example:
    torch.manual_seed(2)
    return Example(Rows(), (torch.randn(batch, 16),), loss=square)


def _listening_addresses() -> set[str]:
    """Addresses on which this process and its workers wait for connections (Linux)."""
    found = set()
    for process in [os.getpid(), *(child.pid for child in multiprocessing.active_children())]:
        own = set()
        for name in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                own.add(os.readlink(name).removeprefix("socket:[").removesuffix("]"))
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process}/net/{kind}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in own:
                    found.add(socket.inet_ntoa(bytes.fromhex(words[1][:8])[::-1]) if kind == "tcp" else "::")
    return found


def test_a_strategy_from_a_file_trains_saves_and_goes_on(tmp_path: Path) -> None:
    example = _example()
    parts = [Part((0, 1), (5, 3), sync=PS, server=1), Part((0, 1), (8, 8), Mode.DUPLICATE)]
    lm.save(strategy_answer(example, parts, batch=8), tmp_path / "strategy.json")
    batches = [torch.randn(8, 16) for _ in range(3)]
    with lm.launch(
        tmp_path / "strategy.json", example.model, loss=square, optimizer=adamw, compare_every=1
    ) as run:
        losses = [run.step(one) for one in batches]
        path, state = run.save(tmp_path / "saved"), run.state_dict()
        outputs, loss = run.predict(batches[0]), run.evaluate(batches[0])
        timeline, drift = run.timeline(), run.drift()
        assert _listening_addresses() == {"127.0.0.1"}  # no port is open to other machines
    plain = train_whole(example.model, batches, adamw, loss=square)
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    assert list(state) == list(plain.state)
    assert largest_difference(state, plain.state) < 1e-5
    own = Rows()
    own.load_state_dict(state)
    assert torch.allclose(outputs, own(batches[0]), atol=1e-5)
    assert loss == pytest.approx(float(square(own(batches[0])).detach()), rel=1e-4)
    assert Checkpoint(path).names == set(state)
    assert timeline.step_s > 0
    assert set(timeline.resource.tolist()) == {0, 1}
    assert drift.checks == 3
    assert drift.largest < 1e-5


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path) -> None:
    example, batches = _example(), [torch.randn(8, 16) for _ in range(4)]
    one = strategy_answer(example, [Part((0, 1), (5, 3), sync=PS, server=1)], batch=8)
    with lm.launch(one, example.model, loss=square, optimizer=adamw) as run:
        for batch in batches[:2]:
            run.step(batch)
        run.save(tmp_path)
    parts = [Part((1,), (8,), Mode.PLACE), Part((0, 1), (2, 6), sync=AR)]
    other = strategy_answer(example, parts, batch=8)
    with lm.launch(other, _example().model, loss=square, optimizer=adamw) as run:
        run.load(tmp_path)
        for batch in batches[2:]:
            run.step(batch)
        state = run.state_dict()
    plain = train_whole(example.model, batches, adamw, loss=square)
    assert largest_difference(state, plain.state) < 1e-5


@pytest.mark.slow
def test_a_strategy_that_is_a_pipeline_runs_as_one() -> None:
    example, batches = _example(), [torch.randn(8, 16) for _ in range(3)]
    parts = [Part((at,), (8,), Mode.PIPELINE, microbatches=3) for at in (1, 0)]
    with lm.launch(
        strategy_answer(example, parts, batch=8), example.model, loss=square, optimizer=adamw
    ) as run:
        for batch in batches:
            run.step(batch)
        state = run.state_dict()
    plain = train_whole(example.model, batches, adamw, loss=square)
    assert largest_difference(state, plain.state) < 1e-5


def _save_captured(folder: Path, batch: int = 4) -> Path:
    """A strategy for the model of a file, as the command line runs it."""
    source = folder / "own_model.py"
    source.write_text("from tests.distributed.run_models import build_rows as build\n")
    problem = lm.problem(f"{source}:build", parse_cluster("cpu#0-2GB, cpu#1-2GB"))
    group = OpGroup(np.arange(problem.graph.num_ops), (0, 1), (3, 1), Mode.REPLICATE, AR)
    strategy = Strategy("by hand", problem.graph.digest, problem.cluster.digest, batch, (group,))
    answer = StrategyAnswer(problem, strategy, "by hand", 1.0, 0.0, "", np.zeros(2, dtype=np.int64), 0.0)
    lm.save(answer, folder / "strategy.json")
    return folder / "strategy.json"


def _run(words: list[str]) -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if key != "RANK"}
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.mark.slow
def test_the_command_line_and_torchrun_take_a_strategy(tmp_path: Path) -> None:
    path = str(_save_captured(tmp_path))
    words = [sys.executable, "-m", "loadmaster", "run", path, "--steps", "2"]
    alone = _run([*words, "--launch", "local", "--json"])
    assert alone.returncode == 0, alone.stderr
    ran = json.loads(alone.stdout)
    assert ran["loadmaster"] == "strategy run"
    assert [one["rows"] for one in ran["ranks"]] == [[3], [1]]
    assert ran["sent_bytes"]["allreduce"] == 2 * 4 * sum(one.numel() for one in Rows().parameters())
    shown = _run([*words, "--launch", "local"])
    assert "by hand: 1 groups on 2 processes" in shown.stdout, shown.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    together = _run([*torchrun, "-m", "loadmaster", "run", path, "--steps", "2", "--json"])
    assert together.returncode == 0, together.stderr
    assert json.loads(together.stdout)["losses"] == pytest.approx(ran["losses"], rel=1e-6)


@pytest.mark.slow
def test_running_without_processes_is_refused(tmp_path: Path) -> None:
    example = _example()
    lm.save(strategy_answer(example, [Part((0,), (8,), Mode.PLACE)], batch=8), tmp_path / "s.json")
    done = _run([sys.executable, "-m", "loadmaster", "run", str(tmp_path / "s.json")])
    assert done.returncode == 2
    assert "add --launch local" in done.stderr.replace("\n", " ")


def test_what_cannot_be_run_is_refused_before_processes_start() -> None:
    example = _example()
    two = [Part((0, 1), (5, 3), sync=AR)]
    good = strategy_answer(example, two, batch=8)
    with pytest.raises(InputError, match="takes no 'wait'"):
        lm.launch(good, example.model, wait=3)
    with pytest.raises(InputError, match="compare_every is -1"):
        lm.launch(good, example.model, compare_every=-1)
    with pytest.raises(InputError, match="dict cannot be launched"):
        lm.launch({}, example.model)  # type: ignore[arg-type]
    full = dataclasses.replace(good, peak_bytes=np.array([1, 2**40]))
    with pytest.raises(PlanError, match=r"does not fit on cpu#1: it needs 1.0 TiB"):
        layout_of_strategy(full)
    mixed = [Part((0,), (8,), Mode.PIPELINE, microbatches=2), Part((0, 1), (4, 4), sync=AR)]
    with pytest.raises(PlanError, match="a pipeline beside other modes"):
        layout_of_strategy(strategy_answer(example, mixed, batch=8))
    strange = dataclasses.replace(good, strategy=dataclasses.replace(good.strategy, graph_digest="other"))
    with pytest.raises(PlanError, match="the strategy is for graph 'other'"):
        layout_of_strategy(strange)


@pytest.mark.slow
def test_batch_norm_sees_its_own_rows_and_a_dead_worker_ends_the_run() -> None:
    from loadmaster.runtime.distributed.processes import WorkerError

    torch.manual_seed(2)
    example = Example(Net(), (torch.randn(8, 16),), loss=square)
    answer = strategy_answer(example, [Part((0, 1), (4, 4), sync=AR)], batch=8)
    with lm.launch(answer, example.model, loss=square, optimizer=adamw) as run:
        assert run.step(torch.randn(8, 16)) > 0
        assert run._group is not None
        run._group.processes[1].kill()
        with pytest.raises(WorkerError, match="rank 1"):
            run.step(torch.randn(8, 16))
