"""Damaged files and requests given to every command that reads them (docs/robustness.md)."""
