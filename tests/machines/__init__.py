"""Recorded machines as text, and the program that makes those that nobody could record."""
