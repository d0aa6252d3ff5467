"""Answers found by trying many plans."""
