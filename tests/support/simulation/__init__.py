"""The real core in a world that can do everything a world does to it: seeded, checked after every event, repeatable."""
