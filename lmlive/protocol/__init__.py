"""What goes over the wire: bytes in, messages out, and back; docs/protocol.md shows it in hex."""
