"""What environments stand on: simulators and sandboxes in processes of their own, one for each session."""
