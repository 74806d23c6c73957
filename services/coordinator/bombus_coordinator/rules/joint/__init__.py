"""What follows from claims and ends of joint episodes, which are one episode on each of several engines."""
