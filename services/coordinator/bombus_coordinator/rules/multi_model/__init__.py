"""The rules for claiming and ending multi-model episodes, which consist of one episode on each of several engines."""
