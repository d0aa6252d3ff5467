"""States of a search scored in less than a millisecond: groups, segments, actions, shares and factors.

`evaluator` is the front door. The room may import `strategies.splitting`, `strategies.lowering` and what lies
below `strategies`.
"""
