"""A smaller problem whose plans are plans of the original: which ops may be one group without a circle, and
the groups themselves. `groups.group_ops` is the front door. It knows no algorithm.
"""
