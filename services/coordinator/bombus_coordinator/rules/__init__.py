"""What follows from each message and from time: pure rules, by what they are about."""
