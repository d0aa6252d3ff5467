"""Run: a plan trained for some steps, with what was measured beside what was predicted (`lm.run`).

The front door is `launch`: `api.run` calls its functions in their order. The room may import the rest of
`runtime` and everything below it.
"""
