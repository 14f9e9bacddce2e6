"""Where bytes lie: shuttles, extents and layouts, the ground floor that every other package stands on."""
