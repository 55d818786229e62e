"""Bridges between engines and lmlive; each imports its engine, so import the one you need."""
