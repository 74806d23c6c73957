"""What environments run on: simulators and sandboxes in their own processes, one for each session."""
