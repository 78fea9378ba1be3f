"""The tasks. To add one: a module here, one of the same name in launcher/train/tasks/, a line in TASKS."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.tasks.causal_lm import CausalLM
from launcher.tasks.dpo import DPO
from launcher.tasks.embedding import Embedding
from launcher.tasks.grpo import GRPO
from launcher.tasks.image_classification import ImageClassification
from launcher.tasks.image_text_to_text import ImageTextToText
from launcher.tasks.kto import KTO
from launcher.tasks.own import Own
from launcher.tasks.reranker import Reranker
from launcher.tasks.reward import Reward
from launcher.tasks.rows import RowFormat
from launcher.tasks.seq2seq_lm import Seq2SeqLM
from launcher.tasks.sequence_classification import SequenceClassification
from launcher.tasks.task import Architecture, Task
from launcher.tasks.token_classification import TokenClassification

TASKS: tuple[Task, ...] = (
    CausalLM(),
    Seq2SeqLM(),
    SequenceClassification(),
    TokenClassification(),
    ImageClassification(),
    ImageTextToText(),
    DPO(),
    KTO(),
    Reward(),
    GRPO(),
    Embedding(),
    Reranker(),
    Own(),
)
"""The first is the default of a recipe."""

DEFAULT_TASK = TASKS[0].name
FORMATS: Mapping[str, RowFormat] = {one.name: one for task in TASKS for one in task.row_formats}
"""Name -> row format."""
_BY_NAME: Mapping[str, Task] = {task.name: task for task in TASKS}


INSTEAD: Mapping[str, str] = {
    "gspo": "write `task: grpo` and `trainer.importance_sampling_level: sequence`",
    "dapo": "write `task: grpo`: its `trainer.loss_type` is dapo unless the recipe sets another",
    **dict.fromkeys(
        ("distillation", "gkd", "distill"),
        "no task learns from a teacher's logits; write the teacher's answers as rows of `task: causal-lm`",
    ),
    **dict.fromkeys(
        ("masked-lm", "mlm", "fill-mask"),
        "no task learns masked tokens; `task: own` trains the model and the datasets of your hooks",
    ),
    **dict.fromkeys(
        ("asr", "automatic-speech-recognition"),
        "no task reads audio; `task: own` trains the model and the datasets of your hooks",
    ),
}
"""What is no task, though other tools name it as one -> what to do."""


def task_named(name: str) -> Task:
    """The task of a recipe's `task:`; KeyError for a name that is none."""
    return _BY_NAME[name]


def task_of_tool(tool: str, word: str) -> Task | None:
    """The task with this name in another tool; None where there is none."""
    return next((task for task in TASKS if word in task.known_as.get(tool, ())), None)


def words_of_tool(tool: str) -> tuple[str, ...]:
    """The names of tasks in another tool."""
    return tuple(word for task in TASKS for word in task.known_as.get(tool, ()))


def task_with_images() -> Task:
    """The task whose samples have images beside their tokens."""
    return next(task for task in TASKS if task.sees_images)


def tasks_of(architecture: Architecture) -> tuple[str, ...]:
    """Names of the tasks that a kind of model family can learn, the most usual first."""
    return tuple(task.name for task in TASKS if architecture in task.architectures)
