"""Questions: from what a user asks to the Problem that a placer answers.

The front door is `problem.build_problem`: it reads the source, the devices and the costs that a
`core.question.Question` names. `api`, `capacity` and the command line stand above and ask here; this room may
import `core`, `graph`, `cluster` and `cost`, and knows no simulator.
"""
