"""Exported: the forward pass by `torch.export`, run node by node; every node is an op of the ledger.

Nodes inside of a region without gradients, or under autocast, are ops too ('outer.inner').
"""

import contextlib
import io
import re
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_unflatten

from loadmaster.core.graph import Phase
from loadmaster.graph.torch_capture.paths import export_gaps
from loadmaster.graph.torch_capture.paths.output_objects import OutputObjects, pack_outputs
from loadmaster.graph.torch_capture.record.call_site import parse_call_site
from loadmaster.graph.torch_capture.record.ledger import Op
from loadmaster.graph.torch_capture.record.recorder import Recorder
from loadmaster.modules.fake_model import FakeModel
from loadmaster.modules.op_signature import autocast_word, compute_dtype, kind_of, signature_of
from loadmaster.modules.tensor_trees import list_tensors

_REPEATED = re.compile(r"@\d+")  # a module's second call, as export writes it
_ONE_BY_ONE = threading.RLock()  # torch.export, and what is put in place meanwhile, is for all threads
# checks that export adds; they are no ops of a Graph
UNNAMED = frozenset({torch.ops.aten._assert_tensor_metadata.default, torch.ops.aten._assert_async.msg})


@dataclass(frozen=True, slots=True)
class Exported:
    """A model's forward pass as a graph, and what its outputs are made of."""

    program: torch.export.ExportedProgram
    objects: OutputObjects

    @property
    def num_hidden(self) -> int:
        """Outputs of the graph that are not the model's; they come first."""
        signature = self.program.graph_signature
        return len(signature.output_specs) - len(signature.user_outputs)

    def unflatten_outputs(self, flat: Any) -> Any:
        """What the model would give, of what the graph gives."""
        found, spec = list(flat)[self.num_hidden :], self.program.call_spec.out_spec
        return self.objects.unpack(tree_unflatten(found, spec) if spec is not None else tuple(found))


def export(fake: FakeModel, *, dynamic_shapes: Any = None) -> Exported:
    """The model as a graph; raises what torch.export raises, and Unexported."""
    prints = io.StringIO()  # a failed export prints the graph so far
    quiet = contextlib.redirect_stdout(prints), contextlib.redirect_stderr(prints)
    refused = export_gaps.refuse_unexportable(train=fake.model.training)
    masks = export_gaps.hide_export_from_masks(fake.model, fake.full_masks)
    with _ONE_BY_ONE, fake.mode, quiet[0], quiet[1], refused, masks, pack_outputs(fake.model) as objects:
        program = torch.export.export(
            fake.model, fake.args, fake.kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
    return Exported(program, objects)


def run_exported(exported: Exported, fake: FakeModel, recorder: Recorder) -> Any:
    """Run the graph on the fake model's tensors; gives what the model's forward gives."""
    flat = _bind_inputs(exported.program, fake)
    graph = exported.program.graph_module
    out = _RecordingInterpreter(graph, recorder).run(*flat, enable_io_processing=False)
    return exported.unflatten_outputs(out)


def _bind_inputs(program: torch.export.ExportedProgram, fake: FakeModel) -> list[Any]:
    """A value for every placeholder, in order."""
    names, flat = fake.names(), []
    given = iter(tree_leaves((fake.args, fake.kwargs)))
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            flat.append(next(given))
        elif spec.target in names:
            flat.append(names[spec.target])
        else:
            flat.append(program.constants[str(spec.target)])
    return flat


class _RecordingInterpreter(torch.fx.Interpreter):
    """Runs a graph; what a node runs is written down as that node's."""

    def __init__(self, module: torch.fx.GraphModule, recorder: Recorder, prefix: str = "") -> None:
        super().__init__(module)
        self._recorder = recorder
        self._prefix = prefix

    def run_node(self, n: torch.fx.Node) -> Any:
        """One node, as one op."""
        if n.op != "call_function":
            return super().run_node(n)
        if n.target in UNNAMED:
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        region = _unpack_region(n, args)
        if region is not None:
            inner, context, rest = region
            with context:
                return _RecordingInterpreter(inner, self._recorder, f"{self._prefix}{n.name}.").run(*rest)
        given = list_tensors((args, kwargs))
        op = Op(
            f"{self._prefix}{n.name}",
            kind_of(n.target),
            module_of(n),
            Phase.FORWARD,
            signature=signature_of(n.target, args, kwargs) + autocast_word(),
        )
        self._recorder.line = parse_call_site(n.meta.get("stack_trace"))
        with self._recorder.record_as(op):
            out = super().run_node(n)
            made = list_tensors(out)
            op.dtype = compute_dtype(made, given)
            self._recorder.give_out(made, given)
        self._recorder.line = ""
        return out


def _unpack_region(node: torch.fx.Node, args: Any) -> tuple[torch.fx.GraphModule, Any, Any] | None:
    """A graph inside a node, the context it runs in, and its inputs."""
    name = getattr(node.target, "__name__", "")
    if name == "wrap_with_set_grad_enabled":
        return args[1], torch.set_grad_enabled(args[0]), args[2:]
    if name == "wrap_with_autocast":
        device, dtype, enabled, cached = args[:4]
        context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)
        return args[4], context, args[5:]
    if name in ("wrap", "invoke_subgraph") and isinstance(args[0], torch.fx.GraphModule):
        named = name == "invoke_subgraph"  # the graph's name comes before its inputs
        return args[0], contextlib.nullcontext(), args[2 if named else 1 :]
    return None


def module_of(node: torch.fx.Node) -> str:
    """The path of the innermost module a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return _REPEATED.sub("", str(stack[-1][0])) if stack else ""
