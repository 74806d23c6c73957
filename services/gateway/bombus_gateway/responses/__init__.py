"""OpenAI's Responses dialect, whose requests and answers consist of items."""
