"""Eager references of the operators, in plain fp32 PyTorch: the oracle of every test.

One file an operator, one public function of the operator's name; other files hold what several share. A file imports
torch, the standard library and its neighbours here alone, because ``cpu:reference`` artifacts carry its text.
"""
