"""Real schedulers in shadow mode: read what they record, log what would be advised, change nothing.

Front doors: `shadow.advise_queue`, `log.score_log`. May import `advise`, `jobs`. Ray is imported where it
is used.
"""
