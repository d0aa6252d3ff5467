"""The tests; a package, so that builders, strategies and the reference can be imported from any of them."""
