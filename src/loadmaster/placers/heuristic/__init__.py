"""Constructors: one pass, no search."""
