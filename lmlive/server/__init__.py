"""The shell around the pure parts: sockets, threads and the event loop of one server.

``router`` is the door, ``lanes`` are the threads, ``rundir`` owns every name in the file system. Nothing here decides
who is alive or what a verb means: that is in ``lmlive.liveness`` and ``lmlive.modules``.
"""
