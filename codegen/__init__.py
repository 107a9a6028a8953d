"""kimigraph.codegen: import it by that name; the folder's own name would make a second copy with its own state."""

if __name__ != "kimigraph.codegen":
    raise ImportError("import this package as 'kimigraph.codegen', not as 'codegen'")
