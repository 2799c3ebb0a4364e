"""Static analysis of shell commands: the programs they run, and whether they only read."""
