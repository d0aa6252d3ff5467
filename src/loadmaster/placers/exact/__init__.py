"""Answers with a proof."""
