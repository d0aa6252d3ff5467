"""How many devices a job should get: whether to admit it, which devices, and when it will be done.

Front door: `advise.advise`. Rooms: `jobs` (jobs, scaling curves, the state of a cluster), `environments`
(clusters to
replay streams of jobs on), `policies` (one file each), `bounds` (what no policy can beat), `learned`
(networks and their
training), `adapters` (real schedulers, in shadow mode). Stands beside `train`, above `api`.
"""
