"""kimigraph.passes: import it by that name; the folder's own name would make a second copy with its own state."""

if __name__ != "kimigraph.passes":
    raise ImportError("import this package as 'kimigraph.passes', not as 'passes'")
