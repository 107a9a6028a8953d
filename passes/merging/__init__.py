"""What ``merge-horizontal`` is made of: products side by side, products of few rows in one kernel."""
