"""The worker library: what an engine's processes use to share KV through a server.

``worker.Worker`` for the processes that hold KV, ``scheduler.Scheduler`` for the one that asks what is stored.
"""
