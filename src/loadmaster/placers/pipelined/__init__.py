"""Algorithms for whole steps of micro-batches: stages, devices, schedule and replicas. One file each; the
parts that they share begin with an underscore.
"""
