"""Capacity: whether a model fits, what it holds at the worst moment, and what would make it fit."""
