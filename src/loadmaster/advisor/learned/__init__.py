"""Learned policies: two networks, their training by masked PPO, and their weights (safetensors). Needs torch.

Front doors: `training.train_policy`, `networks.load_network`. May import `environments` and `jobs`.
"""
