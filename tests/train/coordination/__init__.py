"""Who runs when: scheduler, workers, searchers, callbacks, signals, and what they say."""
