"""`question`: ask the person questions, and wait for the answers."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct, field

from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, make_spec, parse_arguments
from culm.tools.base import CallRequest, CallResult, QuestionPlan
from culm.wire.asks import (
    Choice,
    Question,
    QuestionRequest,
    QuestionResponse,
    QuestionType,
)
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

DESCRIPTION = """\
Ask the person one to five questions and wait for the answers. Use it when a decision is theirs and
guessing would cost work; not for facts you can find out yourself. Put related questions into one
call. A question may be skipped; then decide yourself and mention it."""

QUESTION = "question"  # Its name, for callers that leave it out if nobody can answer.
# The limits of the dialogs of clients.
QUESTIONS_MAX = 5
QUESTION_CHARS_MAX = 240
DESCRIPTION_CHARS_MAX = 600
CHOICES_MIN, CHOICES_MAX = 2, 5
CHOICE_CHARS_MAX = 200
LABEL_CHARS_MAX = 80
NOTE_OF_QUESTION = "_question"  # The key of a note about the question as a whole.
CONFIRM = ("Ready to go?", "Review your answers above and confirm.")


class ChoiceArgument(Struct):
    label: Annotated[str, Meta(description="The text of the choice.", max_length=CHOICE_CHARS_MAX)]
    description: Annotated[str, Meta(description="Its meaning.", max_length=CHOICE_CHARS_MAX)] = ""
    id: Annotated[
        str, Meta(description="A short name for it; made if left out.", max_length=CHOICE_CHARS_MAX)
    ] = ""


class QuestionArgument(Struct):
    question: Annotated[
        str,
        Meta(description="The question, in one sentence.", max_length=QUESTION_CHARS_MAX),
    ]
    description: Annotated[
        str,
        Meta(
            description="The context needed to answer it; Markdown.",
            min_length=1,
            max_length=DESCRIPTION_CHARS_MAX,
        ),
    ]
    type: Annotated[QuestionType, Meta(description="How it is answered.")]
    label: Annotated[
        str, Meta(description="A short title for its tab.", max_length=LABEL_CHARS_MAX)
    ] = ""
    choices: Annotated[
        list[ChoiceArgument],
        Meta(
            description="Two to five, for single_choice and multi_choice.", max_length=CHOICES_MAX
        ),
    ] = field(default_factory=list[ChoiceArgument])


class QuestionArguments(Struct):
    questions: Annotated[
        list[QuestionArgument],
        Meta(description="One to five questions.", min_length=1, max_length=QUESTIONS_MAX),
    ]
    confirm_title: Annotated[
        str, Meta(description="Heading of the last page, if there are several.", max_length=240)
    ] = ""
    confirm_description: Annotated[
        str, Meta(description="Text of the last page.", max_length=DESCRIPTION_CHARS_MAX)
    ] = ""


SPEC = make_spec(QUESTION, DESCRIPTION, QuestionArguments, ToolFacts())


class QuestionTool(Struct, frozen=True):
    """It changes nothing; its questions are asked before it runs, see `QuestionPlan`."""

    spec: ToolSpec
    parallel: bool = False
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> QuestionPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, QuestionArguments)
            questions = [
                _question(number, one) for number, one in enumerate(arguments.questions, 1)
            ]
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        several = len(questions) > 1
        title, description = CONFIRM if several else ("", "")
        return QuestionPlan(
            questions,
            _answer,
            arguments.confirm_title or title,
            arguments.confirm_description or description,
        )


def make_question() -> QuestionTool:
    return QuestionTool(SPEC)


def _question(number: int, arguments: QuestionArgument) -> Question:
    choices = [
        Choice(choice.id or f"choice-{index}", choice.label, choice.description)
        for index, choice in enumerate(arguments.choices, 1)
    ]
    has_choices = arguments.type in ("single_choice", "multi_choice")
    if has_choices and len(choices) < CHOICES_MIN:
        raise InvalidArguments(f"question {number} needs {CHOICES_MIN} to {CHOICES_MAX} choices")
    if len({choice.id for choice in choices}) < len(choices):
        raise InvalidArguments(f"question {number} has two choices with one id")
    return Question(
        "",
        arguments.type,
        arguments.question,
        arguments.label,
        arguments.description,
        choices if has_choices else [],
    )


def _answer(request: QuestionRequest, responses: Sequence[QuestionResponse]) -> CallResult:
    by_id = {response.request_id: response for response in responses}
    texts = [
        f"{question.question}\n{_answer_text(question, by_id.get(question.id))}"
        for question in request.questions
    ]
    return CallResult("\n\n".join(texts))


def _answer_text(question: Question, response: QuestionResponse | None) -> str:
    if response is None:
        return "(skipped)"
    labels = {choice.id: choice.label for choice in question.choices}
    lines = [f"- {labels[chosen]}" for chosen in response.selected_ids if chosen in labels]
    if response.yes is not None:
        lines.append("yes" if response.yes else "no")
    if response.fill_in_text:
        lines.append(response.fill_in_text)
    for about, note in response.notes.items():
        of = "" if about == NOTE_OF_QUESTION else f" on {labels.get(about, about)}"
        lines.append(f"Note{of}: {note}")
    return "\n".join(lines) or "(skipped)"
