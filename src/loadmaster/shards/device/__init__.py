"""Devices as the trainer sees them: memory under a cap (`arena`), streams and events (`streams.Device`), on a
GPU or made of host memory, and the thread and the kernels that step an optimizer on the host.
`cpu_device.CpuDevice` and `cuda_device.CudaDevice` are the front doors. It may import `spec`, but not
`model`.
"""
