"""Request: what `capture` was asked, and the paths it tries in turn."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from loadmaster.core.errors import GraphError, InputError
from loadmaster.core.graph import Graph
from loadmaster.core.raised import shorten_error
from loadmaster.graph.origin import add_reason
from loadmaster.graph.torch_capture.paths import export_gaps
from loadmaster.graph.torch_capture.paths.export_path import export, run_exported
from loadmaster.graph.torch_capture.paths.optimizer_update import rebind_optimizer
from loadmaster.graph.torch_capture.paths.refusals import check_inputs, check_model, check_options
from loadmaster.graph.torch_capture.paths.size_ranges import (
    Ranges,
    describe_sizes,
    require_same_ops,
    resize_inputs,
)
from loadmaster.graph.torch_capture.paths.step_findings import find_findings
from loadmaster.graph.torch_capture.paths.trace_path import describe_last_op, run_traced, track_modules
from loadmaster.graph.torch_capture.paths.training_step import Step
from loadmaster.graph.torch_capture.record.accumulation import MicroStepRepeater, micro_step_suffix
from loadmaster.graph.torch_capture.record.data_dependent_reads import (
    Answers,
    ReadMode,
    record_reads,
    watch_others,
    with_same_weights,
)
from loadmaster.graph.torch_capture.record.ledger import Ledger
from loadmaster.graph.torch_capture.record.recorder import Recorder
from loadmaster.graph.torch_capture.record.target_kernels import Kernels, require_target
from loadmaster.graph.whole_modules import group_by_module
from loadmaster.modules.fake_model import FakeModel, make_fake_model
from loadmaster.modules.gpu_casts import Casts
from loadmaster.modules.torch_state import leave_transforms


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One call of `capture`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    optimizer: Any
    loss: Callable[[Any], torch.Tensor] | None
    train: bool
    target: str | None
    autocast: torch.dtype | None
    assume: float
    name: str
    accumulation: int = 1
    grad_scaler: bool = False
    ranges: Ranges = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be captured, by name."""
        check_model(self.model)
        check_inputs(self.args, self.kwargs)
        require_target(self.target)
        check_options(
            self.train, autocast=self.autocast, accumulation=self.accumulation, grad_scaler=self.grad_scaler
        )

    def capture_graph(self, path: str | None) -> Graph:
        """By the path asked for, else by the first that works; the same ops all over the ranges."""
        graph = self._first(path)
        for end in (0, 1) if self.ranges else ():
            sizes = {name: ends[end] for name, ends in self.ranges.items()}
            args, kwargs = resize_inputs((self.args, self.kwargs), sizes)
            other = replace(self, args=args, kwargs=kwargs, optimizer=None, ranges={})
            try:
                found = other._first(graph.capture.split(";")[0])
            except GraphError as problem:
                raise GraphError(f"with {describe_sizes(sizes)}: {problem}; narrow the range") from problem
            require_same_ops(graph, found, sizes)
        return graph

    def _first(self, path: str | None) -> Graph:
        attempts = [path] if path is not None else ["joint", "traced", "estimated"]
        reasons: list[str] = []  # why there is no graph to run
        for attempt in attempts:
            try:
                graph = self._capture_by(attempt, strict=path is None)
                return add_reason(graph, reasons[0]) if reasons else graph
            except InputError:
                raise
            except Exception as problem:  # torch and the user's model may raise anything
                leave_transforms()
                reasons.append(shorten_error(problem))
                if attempt == attempts[-1]:
                    raise self._explain_failure(problem) from problem
        raise AssertionError("there is a last attempt")

    def _explain_failure(self, problem: Exception) -> GraphError:
        """Whose error it is, shortened, and where the model stopped."""
        fake = self._make_fake()
        step = self._step(fake, Answers(assume=self.assume))
        try:
            step.begin()
            modes = step.recorder, Kernels(self.target), ReadMode(step.recorder.answers)
            with track_modules(fake.model, step.recorder), fake.mode, modes[0], modes[1], modes[2]:
                run_traced(fake)
        except Exception as own:
            return GraphError(
                f"{self.name} cannot run on the example inputs: {shorten_error(own)}"
                f" ({describe_last_op(step.recorder)}); give inputs it can run on"
            )
        return GraphError(f"{self.name} runs, but its step cannot be captured: {shorten_error(problem)}")

    def _capture_by(self, path: str, *, strict: bool) -> Graph:
        """`strict`: a read that must be assumed is a failure of torch.export's path."""
        fake = self._make_fake()
        if path == "traced":
            return self._capture_by_trace(fake, path)
        answers = Answers(assume=self.assume)
        try:
            with self._enter_autocast(), watch_others(answers):
                exported = export(fake)
        except Exception:
            if path == "joint":
                raise
            return self._capture_by_trace(self._make_fake(), path)
        step = self._step(fake, answers)
        try:
            graph = self._record_step(step, lambda: run_exported(exported, fake, step.recorder), path)
        except InputError:
            raise
        except Exception:
            leave_transforms()
            if path == "joint":
                raise
            return self._capture_by_trace(self._make_fake(), path)
        if step.recorder.answers.num_assumed and path == "estimated":
            return self._capture_by_trace(self._make_fake(), path)
        if strict and step.recorder.answers.num_assumed:
            raise RuntimeError("values were read in the backward pass")
        return graph

    def _capture_by_trace(self, fake: FakeModel, path: str) -> Graph:
        answers = Answers(
            assume=self.assume,
            reads=record_reads(self._model_in_mode(), self.args, self.kwargs, train=self.train),
        )
        # plain Python runs the model, by hooks: frozen parts peak where it holds what autograd does not; an
        # estimated step peaks where autograd holds them all
        step = self._step(fake, answers, holds=path == "traced" or not self.train)
        with track_modules(fake.model, step.recorder):
            return group_by_module(self._record_step(step, lambda: run_traced(fake), path), sums_apart=False)

    def _make_fake(self) -> FakeModel:
        fake = make_fake_model(self.model, self.args, self.kwargs)
        fake.model.train(self.train)
        return fake

    def _model_in_mode(self) -> nn.Module:
        """The model in the mode asked for; a copy, with the same weights, where it is in the other."""
        if self.model.training == self.train:
            return self.model
        return with_same_weights(self.model).train(self.train)

    def _step(self, fake: FakeModel, answers: Answers, *, holds: bool = False) -> Step:
        for twin, real in fake.values:
            answers.known.give(twin, real)
        recorder = Recorder(Ledger(holds=holds), fake.mode, answers=answers, target=self.target)
        optimizer = rebind_optimizer(self.optimizer, self.model, fake.model)
        scale = None
        if self.grad_scaler:
            with fake.mode:
                scale = torch.empty(())
        at_once = self.target == "cuda"
        return Step(fake, recorder, self.loss, optimizer, at_once, self.accumulation, scale)

    def _record_step(self, step: Step, forward: Callable[[], Any], path: str) -> Graph:
        ops = step.begin()
        recorder, mode = step.recorder, step.fake.mode
        recomputing = (
            export_gaps.replace_reentrant_checkpoints() if path == "estimated" else contextlib.nullcontext()
        )
        with mode, torch.set_grad_enabled(self.train), recomputing:
            moved: dict[int, int] = {}
            with recorder, Kernels(self.target), ReadMode(recorder.answers):
                self._record_micro_step(step, forward, path, 1)
                if self.accumulation > 1:
                    again = MicroStepRepeater(recorder.ledger, len(recorder.ledger.ops), step.follows)
                    self._record_micro_step(step, forward, path, 2)
                    moved = again.repeat(self.accumulation)
            step.keep_outputs()
            if self.train:
                step.update(ops, step.collect_estimated(moved) if path == "estimated" else None)
        if path == "traced":
            step.keep_caches()
        graph = recorder.ledger.graph(self.name, self._describe_capture(path, recorder))
        return replace(
            graph,
            assumptions=recorder.answers.assumptions,
            warnings=find_findings(step.fake, graph, recorder.products, train=self.train),
            notes=self._list_notes(recorder.answers),
        )

    @staticmethod
    def _list_notes(answers: Answers) -> tuple[str, ...]:
        """What the captured ops depend on beside the model and its inputs."""
        notes = [
            f"which ops run depends on a random number drawn at {line or 'a line that is not known'}"
            + (f" in module {module!r}" if module else "")
            + (f" ({count} times)" if count > 1 else "")
            + "; the captured step is that of one seeded draw"
            for (line, module), count in answers.drawn.items()
        ]
        if answers.others_drawn:
            notes.append(
                f"the model draws from {answers.others_drawn} while it runs, and may run other ops with"
                " other numbers; the captured step is that of one seeded draw"
            )
        return tuple(notes)

    def _record_micro_step(self, step: Step, forward: Callable[[], Any], path: str, number: int) -> None:
        """Forward and backward once."""
        step.recorder.begin_forward(micro_step_suffix(number))
        with self._enter_autocast():
            with watch_others(step.recorder.answers):
                out = step.forward(forward)
            lost = step.compute_loss(out) if self.train else None
        if lost is not None and path == "estimated":
            step.estimate(lost)
        elif lost is not None:
            step.backward(lost)

    def _enter_autocast(self) -> contextlib.ExitStack:
        """Autocast as the target does it."""
        stack = contextlib.ExitStack()
        if self.autocast is not None:
            stack.enter_context(torch.autocast("cpu", dtype=self.autocast))
            stack.enter_context(Casts(self.target))
        return stack

    def _describe_capture(self, path: str, recorder: Recorder) -> str:
        words = [path]
        words += ["kernels of cuda"] * (self.target == "cuda")
        words += [f"autocast {str(self.autocast).removeprefix('torch.')}"] * (self.autocast is not None)
        words += [f"accumulation {self.accumulation}"] * (self.accumulation > 1)
        words += ["grad_scaler"] * self.grad_scaler
        words += [f"{name} {low} to {high}" for name, (low, high) in self.ranges.items()]
        if recorder.num_backward:
            words.append(
                f"{100 * recorder.num_attributed / recorder.num_backward:.1f} % of backward attributed"
            )
        answers = recorder.answers
        if answers.num_followed:
            words.append(f"{answers.num_followed} value{'s' * (answers.num_followed > 1)} read in a real run")
        if answers.num_assumed:
            words.append(f"{answers.num_assumed} branch{'es' * (answers.num_assumed > 1)} assumed")
        return "; ".join(words)
