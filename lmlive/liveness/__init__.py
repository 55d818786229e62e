"""Who is alive: rules and bookkeeping without clock, loop or socket."""
