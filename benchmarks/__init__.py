"""Speed and quality, as ratios in one run; never in a test with a stopwatch."""
