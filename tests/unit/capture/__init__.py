"""Captured training steps against PyTorch itself."""
