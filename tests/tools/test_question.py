"""The question tool: its arguments, and the result made from the answers."""

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


async def test_a_batch_contains_the_questions_without_the_ids_of_the_model() -> None:
    one = {**GOOD, "id": "mine", "label": "DB", "type": "single_choice"}
    one["choices"] = [{"label": "A", "id": "a"}, {"label": "B", "description": "The other."}]
    plan = await prepared(one, {**GOOD, "label": None, "choices": None})
    assert isinstance(plan, QuestionPlan)
    assert list(plan.questions) == [
        Question(
            "", "single_choice", "Which?", "DB", "Pick one.",
            [Choice("a", "A"), Choice("choice-2", "B", "The other.")],
        ),
        Question("", "yes_no", "Which?", "", "Pick one."),
    ]  # fmt: skip
    assert (plan.confirm_title, plan.confirm_description) == (
        "Ready to go?", "Review your answers above and confirm.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "title"), [({}, ""), ({"confirm_title": "So?"}, "So?")], ids=["none", "own"]
)
async def test_a_single_question_has_a_confirm_page_only_if_the_model_asks(
    more: dict[str, Json], title: str
) -> None:
    plan = await prepared(GOOD, **more)
    assert isinstance(plan, QuestionPlan)
    assert (plan.confirm_title, plan.confirm_description) == (title, "")


@pytest.mark.parametrize(
    ("questions", "message"),
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
async def test_questions_that_no_dialog_can_show_are_refused_with_the_field(
    questions: list[Json], message: str
) -> None:
    result = await prepared(*questions)
    assert isinstance(result, CallResult)
    assert (result.is_error, message in result.content) == (True, True), result.content


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
async def test_the_result_lists_each_question_with_its_answer(
    response: QuestionResponse | None, read: str
) -> None:
    plan = await prepared(GOOD)
    assert isinstance(plan, QuestionPlan)
    question = Question("q", "multi_choice", "Which?", choices=[Choice("a", "A"), Choice("b", "B")])
    other = Question("r", "free_text", "Else?")
    request = QuestionRequest("b", "s", "c", [question, other])
    responses = [QuestionResponse("r", fill_in_text="this"), *([response] if response else [])]
    assert plan.answer(request, responses) == CallResult(f"Which?\n{read}\n\nElse?\nthis")
