"""Devices and links: words, TOML, presets, and what this machine has."""
