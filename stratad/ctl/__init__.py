"""stratactl: what a person at a terminal, or a script, asks of the daemon and of the host it runs on."""
