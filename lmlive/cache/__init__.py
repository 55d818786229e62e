"""What a KV cache is made of: layouts, chunk keys, the arena, the store, leases. Pure: no clock, no sockets."""
