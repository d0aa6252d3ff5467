"""What is to be said of a plan, and what follows when it is questioned: memory over time, reasons of
waiting, the critical path; `explain`, `diff` and `whatif`, which simulate or plan again. Every answer is a
noun of `core.review` or `core.outcomes`, which `report` draws. It may import everything below `api`.
"""
