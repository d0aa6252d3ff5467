"""Learned placers: tables, networks, their training and what judges them."""
