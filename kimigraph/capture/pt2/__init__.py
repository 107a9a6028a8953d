"""Front end for ``.pt2`` files: checks, then the exported program as any other model."""
