"""What every part that handles a `torch.nn.Module` shares: weights in files, models on `meta` made real,
fake copies, optimizer state, bytes counted, random numbers and Python state kept, two runs compared. It knows
nothing of graphs, plans or devices of a cluster; it may import `core` only. [torch]
"""
