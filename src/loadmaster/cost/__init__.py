"""Graph x Cluster -> Costs."""
