"""The language that all rooms speak: operators, descriptors, printer, verifier, and the types that cross rooms."""
