"""Timelines for people: traces."""
