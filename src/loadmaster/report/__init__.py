"""Answers for people and for files: tables, descriptions, JSON documents and Chrome traces. It reads nouns
only, so it knows no placer and no runtime; it may import the simulator and what lies below it.
"""
