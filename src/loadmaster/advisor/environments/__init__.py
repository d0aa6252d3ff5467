"""Clusters that streams of jobs are replayed on: the published one, the corrected one, and measured traces.

Front doors: `world.build_world` and `engine.replay` (published and corrected), `trace_engine.replay_trace`
(traces). May import `jobs` and what stands below the advisor; knows no policy.
"""
