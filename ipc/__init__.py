"""What the processes say: to each other (messages, frames, sockets) and to people (logs)."""
