"""Device memory of workers and the server's own arena: opening, copying, closing.

It decides nothing about instances: it is told what to open and what to close. Only release.py is pure; the rest runs on
lane threads, never on the event loop.
"""
