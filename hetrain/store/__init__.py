"""Owners of rows and workers' caches of them."""
