"""Eager references of the operators, in plain fp32 PyTorch: the oracle of every test.

One file an operator (and what several share), one public function of the operator's name. A file imports torch and the standard library alone,
because ``cpu:reference`` artifacts carry its text.
"""
