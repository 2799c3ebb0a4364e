"""Shell commands, judged on their syntax tree: what they run, and whether they only read."""
