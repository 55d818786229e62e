"""The demo: two engines share a prefix through lmlive, one dies, nothing leaks, the server restarts, work goes on."""
