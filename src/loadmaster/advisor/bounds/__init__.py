"""What no policy can beat, over whole streams: most jobs in time (or least blocking), proven.

Front doors: `ramp.least_blocking` (published and corrected cluster) and `traces.most_met`. On the other side,
`hindsight.best_found` is what was possible at least. May import `environments`.
"""
