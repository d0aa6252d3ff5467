"""The graph network that guides a search for strategies: features, network, weights. Needs torch.

`guide` is the front door. The room may import what `strategies` may, and torch.
"""
