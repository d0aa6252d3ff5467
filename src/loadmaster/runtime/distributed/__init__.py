"""Plans over several processes and hosts: who starts them, minds them, and what they agree on.

`launch.launch` is the front door (`lm.launch`). `processes` and `watch` start and mind worker processes,
`checkpoints` writes and reads what survives them, `timelines` merges what they measured, `hosts` emulates
machines on one; none of these knows what the processes compute. `pipeline` does: it cuts a model into stages
and runs them. The room may import the graph engine and everything below it. Needs the extra `[torch]`.
"""
