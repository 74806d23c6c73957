"""The games of the demo, played by a scripted model."""

import asyncio

from bombus.demo.games import CallRefused, GameTask, Messages, ModelReply, Needle

TASK = GameTask(id="t", prompt="Ann sings. Bob swims. Who swims?", answer="Bob", entry={"names": ["Ann", "Bob"]})


class Scripted:
    """Replies with the right name, and refuses messages in any other role than `roles`."""

    def __init__(self, *roles: str) -> None:
        self.roles = roles
        self.asked: list[Messages] = []

    async def chat(self, messages: Messages, max_tokens: int) -> ModelReply:
        self.asked.append(messages)
        if any(message["role"] not in self.roles for message in messages):
            raise CallRefused("The model's chat template refuses this conversation: System role not supported")
        return ModelReply("Bob", True)

    async def complete(self, prompt: str, max_tokens: int) -> ModelReply:
        raise AssertionError("this game is played in chats")


def test_a_model_that_refuses_system_messages_gets_their_text_with_the_question() -> None:
    game, model = Needle(), Scripted("user")
    assert asyncio.run(game.play(model, TASK)).reward == 1.0
    assert asyncio.run(game.play(model, TASK)).exact
    refused, *asked = model.asked
    assert [message["role"] for message in refused] == ["system", "user"]
    assert asked == 2 * [[{"role": "user", "content": f"{Needle.SYSTEM}\n\n{TASK.prompt}"}]]


def test_any_other_model_gets_a_system_message() -> None:
    game, model = Needle(), Scripted("system", "user")
    assert asyncio.run(game.play(model, TASK)).exact
    assert [[message["role"] for message in messages] for messages in model.asked] == [["system", "user"]]
