"""The steps of one trial: equal to a plain loop to the bit, rehearsed, within memory."""
