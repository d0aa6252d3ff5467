"""One trial's steps, shard by shard: weights up, forward and backward, gradients down, the optimizer on the
host or the device, snapshots, and the check of the first step. `runner.open_runner` is the front door. It may
import `disk` and `shards`, but not `coordination`.
"""
