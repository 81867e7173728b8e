"""The tests, one file per room of the package, and one per promise that spans rooms."""
