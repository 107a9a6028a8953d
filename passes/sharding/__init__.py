"""What ``shard`` is made of: the plan by role, where values lie, and how operators carry that on."""
