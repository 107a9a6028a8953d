"""Tools that look at what a compilation left behind."""
