"""The settings of jobs, cluster files and command lines, declared and checked."""
