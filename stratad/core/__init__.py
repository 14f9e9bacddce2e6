"""The daemon's decisions, free of I/O: events and a time go in, effects come out."""
