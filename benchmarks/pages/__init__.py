"""Sections of docs/benchmarks.md, one file each, written from result files."""
