"""Real devices and what passes between them: copies with their gradients, streams of a GPU, and the bytes
that stand on each logical device. The front doors are `devices` (a cluster's devices on this machine),
`copies` and `byte_accounts`. It is the lowest room of the runtime: it may import nothing of the others,
only `modules` and the layers below the runtime.
"""
