import pytest

from culm.errors import ModelFailed
from culm.ids import MessageId, SessionId
from culm.model.base import AnswerDone, ModelRequest, TextDelta
from culm.model.scripted import ScriptedModel
from culm.wire.messages import Message, Text, TextPart

DONE = AnswerDone("end_turn")


async def test_answers_are_given_in_order_and_requests_are_recorded() -> None:
    model = ScriptedModel([[TextDelta("one"), 0.0, DONE], [DONE]])
    first, second = ModelRequest("first", []), ModelRequest("second", [])
    assert [e async for e in model.stream(first)] == [TextDelta("one"), DONE]
    assert [e async for e in model.stream(second)] == [DONE]
    assert model.requests == [first, second]


async def test_a_recorded_request_does_not_change_with_the_conversation() -> None:
    model = ScriptedModel(lambda _: [DONE])
    request = ModelRequest("", [Message(MessageId("m"), "user", SessionId("s"))])
    _ = [e async for e in model.stream(request)]
    request.messages[0].parts.append(TextPart(Text("more")))
    assert model.requests == [ModelRequest("", [Message(MessageId("m"), "user", SessionId("s"))])]


async def test_a_callable_is_called_for_each_answer() -> None:
    model = ScriptedModel(lambda request: [TextDelta(request.system.upper()), DONE])
    assert [e async for e in model.stream(ModelRequest("abc", []))] == [TextDelta("ABC"), DONE]


async def test_an_exception_in_an_answer_is_raised_at_its_position() -> None:
    model = ScriptedModel([[TextDelta("half"), ModelFailed("t", "d", transient=True)]])
    stream = model.stream(ModelRequest("", []))
    assert await anext(stream) == TextDelta("half")
    with pytest.raises(ModelFailed, match="d"):
        await anext(stream)


async def test_a_request_beyond_the_script_fails() -> None:
    model = ScriptedModel([])
    with pytest.raises(ModelFailed) as caught:
        await anext(model.stream(ModelRequest("", [])))
    assert not caught.value.transient
