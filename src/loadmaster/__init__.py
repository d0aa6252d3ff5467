"""Loadmaster."""
