"""OpenAI's Responses dialect: requests of items, answers of items."""
