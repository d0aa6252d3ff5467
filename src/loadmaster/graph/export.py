"""What the runtime may use of capture; `graph.capture` is the door for everyone else.

A plan names ops. To run it, the runtime exports the model exactly as capture did and names the nodes of the
exported graph as capture names its ops:

    export, Exported, UNNAMED   the forward pass by torch.export; calls in it that are no ops of a Graph
    module_of                   the module that a node comes from
    make_unique                 'mean.2', where 'mean' is taken
    micro_step_suffix           '@2', the second forward and backward pass before an update
    find_size                   the batch size or sequence length of example inputs

Nothing outside of `graph` imports `graph.torch_capture` itself. [torch]
"""

from loadmaster.graph.torch_capture.paths.export_path import UNNAMED, Exported, export, module_of
from loadmaster.graph.torch_capture.paths.size_ranges import find_size
from loadmaster.graph.torch_capture.record.accumulation import micro_step_suffix
from loadmaster.graph.torch_capture.record.ledger import make_unique

__all__ = ["UNNAMED", "Exported", "export", "find_size", "make_unique", "micro_step_suffix", "module_of"]
