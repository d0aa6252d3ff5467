"""How ops are written down as they run: `recorder` sees every op below autograd and enters it into
`ledger`, which becomes the Graph. The others are what these two stand on: ops whose results fake tensors do
not know, values that a model reads, kernels of the target device, and micro-steps that are copied. Start
with `recorder`. It knows nothing of the way a step is run (`paths`).
"""
