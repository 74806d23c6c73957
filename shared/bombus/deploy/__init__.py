"""Renders a deployment for other hosts than this machine: Compose, Kubernetes, Slurm and SkyPilot.

Each manifest is made of a cluster file and of the processes that `bombus.host.layout` derives from it, so that no flag,
port or variable is written down a second time.
"""
