"""Graphs read, generated, coarsened and rewritten."""
