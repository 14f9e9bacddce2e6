"""The process that serves one device: copies rows between an engine's pool and the shuttles, and proves every byte."""
