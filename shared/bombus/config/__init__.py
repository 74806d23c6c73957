"""What can be set: jobs, cluster files and command lines, each declared and checked here."""
