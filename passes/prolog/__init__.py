"""What ``split-indexer-prolog`` is made of: branches that feed an indexer, and what merging or splitting them costs."""
