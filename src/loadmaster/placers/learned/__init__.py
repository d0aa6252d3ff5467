"""Learned placers: Post, cross-entropy, HSDAG, and a learned order that is sliced exactly (docs/learned.md).

A searcher proposes rows of devices and observes their times (`_searcher.py`), so that evaluations are counted
outside of it and may be simulated, computed in closed form by a benchmark, or measured on real devices.
torch is imported only where a network is asked, by `hsdag`, `learned_order` and `training`. May import what
placers may, and the other families.
"""
