"""Max-load: splits of a graph whose busiest device does least, and what the algorithms for it share."""
