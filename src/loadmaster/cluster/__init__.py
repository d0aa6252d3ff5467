"""How a cluster is named, described and probed: shorthands, presets, TOML files, and the devices of this
machine. `parse.parse_cluster` is the front door; a study reads its devices with `local.parse_local_devices`.
It may import `core` only.
"""
