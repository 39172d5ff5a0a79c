"""Measurements, printed as tables: they inform and fail nothing.

A file here is a bench: `python -m tests.bench NAME [ARGUMENT…]` calls its `main(arguments)`.
"""
