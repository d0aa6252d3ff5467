"""Capacity: whether a step fits, what it holds, the largest batch, and what would make it fit (`lm.fit`).

The front door is `fit.answer_fit`. The room builds problems with `questions` and asks `placers` for plans; it
may import everything below `api`, and no torch.
"""
