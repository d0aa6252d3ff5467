"""Graph x Cluster -> Costs: from peak rates (`roofline`), from measurements on this machine (`measure`) and
from the database of earlier ones. `cost_request.load_or_measure_costs` is the front door. It may import
`graph`, `cluster` and what lies below them.
"""
