"""What each verb does: plain functions over the books, without sockets, threads or a loop."""
