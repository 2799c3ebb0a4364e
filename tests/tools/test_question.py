"""What the question tool takes from a model, and what it makes of the answers."""

import pytest

from culm.tools.base import CallRequest, CallResult, QuestionPlan
from culm.tools.question import make_question
from culm.wire.asks import Choice, Question, QuestionRequest, QuestionResponse
from culm.wire.codec import Json

GOOD: dict[str, Json] = {"question": "Which?", "description": "Pick one.", "type": "yes_no"}


async def prepared(*questions: Json, **more: Json) -> QuestionPlan | CallResult:
    arguments: dict[str, Json] = {"questions": list(questions), **more}
    return await make_question().prepare(CallRequest("c", "question", "", arguments))


def choices(*labels: str) -> list[Json]:
    return [{"label": label} for label in labels]


async def test_a_batch_is_what_was_asked_without_the_ids_a_model_gave() -> None:
    one = {**GOOD, "id": "mine", "label": "DB", "type": "single_choice"}
    one["choices"] = [{"label": "A", "id": "a"}, {"label": "B", "description": "The other."}]
    inquiry = await prepared(one, {**GOOD, "label": None, "choices": None})
    assert isinstance(inquiry, QuestionPlan)
    assert list(inquiry.questions) == [
        Question(
            "", "single_choice", "Which?", "DB", "Pick one.",
            [Choice("a", "A"), Choice("choice-2", "B", "The other.")],
        ),
        Question("", "yes_no", "Which?", "", "Pick one."),
    ]  # fmt: skip
    assert (inquiry.confirm_title, inquiry.confirm_description) == (
        "Ready to go?", "Review your answers above and confirm.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "title"), [({}, ""), ({"confirm_title": "So?"}, "So?")], ids=["none", "own"]
)
async def test_one_question_needs_no_page_to_confirm_unless_the_model_words_one(
    more: dict[str, Json], title: str
) -> None:
    inquiry = await prepared(GOOD, **more)
    assert isinstance(inquiry, QuestionPlan)
    assert (inquiry.confirm_title, inquiry.confirm_description) == (title, "")


@pytest.mark.parametrize(
    ("questions", "named"),
    [
        ([], "questions"),
        ([GOOD] * 6, "questions"),
        ([5], "questions"),
        ([{**GOOD, "question": "x" * 241}], "questions[0].question"),
        ([{**GOOD, "description": ""}], "questions[0].description"),
        ([{**GOOD, "description": "x" * 601}], "questions[0].description"),
        ([{"question": "Which?", "type": "yes_no"}], "description"),
        ([{**GOOD, "type": "essay"}], "questions[0].type"),
        ([GOOD, {**GOOD, "type": "single_choice"}], "question 2 needs 2 to 5 choices"),
        ([{**GOOD, "type": "multi_choice", "choices": choices("A")}], "needs 2 to 5 choices"),
        ([{**GOOD, "type": "multi_choice", "choices": choices(*"ABCDEF")}], "].choices"),
        (
            [{**GOOD, "type": "multi_choice", "choices": choices("x" * 201, "y")}],
            "].choices[0].label",
        ),
        (
            [{**GOOD, "type": "multi_choice", "choices": [{"label": "A", "id": "x"}] * 2}],
            "two choices with one id",
        ),
    ],
)
async def test_what_no_dialog_could_show_is_an_error_that_names_the_field(
    questions: list[Json], named: str
) -> None:
    result = await prepared(*questions)
    assert isinstance(result, CallResult)
    assert (result.is_error, named in result.content) == (True, True), result.content


@pytest.mark.parametrize(
    ("response", "read"),
    [
        (None, "(skipped)"),
        (QuestionResponse("q"), "(skipped)"),
        (QuestionResponse("q", selected_ids=["b", "odd", "a"]), "- B\n- A"),
        (QuestionResponse("q", ["a"], "and more"), "- A\nand more"),
        (QuestionResponse("q", yes=True), "yes"),
        (QuestionResponse("q", yes=False), "no"),
        (
            QuestionResponse("q", notes={"a": "why", "_question": "odd one", "z": "gone"}),
            "Note on A: why\nNote: odd one\nNote on z: gone",
        ),
    ],
)
async def test_the_model_reads_each_question_with_what_was_answered(
    response: QuestionResponse | None, read: str
) -> None:
    inquiry = await prepared(GOOD)
    assert isinstance(inquiry, QuestionPlan)
    question = Question("q", "multi_choice", "Which?", choices=[Choice("a", "A"), Choice("b", "B")])
    other = Question("r", "free_text", "Else?")
    request = QuestionRequest("b", "s", "c", [question, other])
    responses = [QuestionResponse("r", fill_in_text="this"), *([response] if response else [])]
    assert inquiry.answer(request, responses) == CallResult(f"Which?\n{read}\n\nElse?\nthis")
