"""The base of all other folders: the context of threads, devices, values, settings, and text."""
