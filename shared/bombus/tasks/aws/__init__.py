"""Tasks with the AWS command line on a simulator: `aws:<tier>`, five tiers of tasks whose end state is checked."""
