"""Trials that share a frozen backbone: its weights are streamed once a step for all of them, and each trial
keeps only its adapter. `group.open_group` opens such a group by hand; a study uses
`group_runner.GroupRegistry`. It may import `execute`, `disk` and `shards`.
"""
