"""Front end for ``.onnx`` files: checks, then a module of ATen operators that is captured as any other."""
