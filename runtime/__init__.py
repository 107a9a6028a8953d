"""kimigraph.runtime: import it by that name; the folder's own name would make a second copy with its own state."""

if __name__ != "kimigraph.runtime":
    raise ImportError("import this package as 'kimigraph.runtime', not as 'runtime'")
