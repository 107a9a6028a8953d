"""One file per library whose interface is private or untyped; typed values come out."""
