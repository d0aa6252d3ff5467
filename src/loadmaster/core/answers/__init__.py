"""What the acts answer beside plans and timelines: `fit`, `run`, a review, a study. Nouns like those of
`core`, which they may import.
"""
