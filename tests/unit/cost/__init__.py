"""Seconds of ops: by the roofline, measured, and kept in a database."""
