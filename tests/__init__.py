"""The tests, one file per module of the package, and one per promise that spans modules."""
