"""What `stratactl bench` runs: each measurement starts its own daemon, moves real bytes, and compares them."""
