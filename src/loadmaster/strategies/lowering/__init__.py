"""A strategy as a flat graph and plan, which simulator, bounds, checks, traces and reports serve unchanged.

`lower` is the front door. Replicas are columns (`replicas`), collectives run on `channels` by the schedules
of `collectives`. The room may import `strategies.splitting`, `cost` and `core`.
"""
