"""`generate`: try the result of a run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from launcher.errors import Problem, RecipeError, printable
from launcher.inputs.finished_run import consent_to_code, output_on_stderr, result_run
from launcher.machine.software import require_modules
from launcher.report.outcome import Outcome, harmless, note

ENDS = "Ctrl-D exits; Ctrl-C stops an answer"


def generate_command(
    run_dir: str,
    *,
    prompt: str | None,
    second: str | None = None,
    images: Sequence[str] = (),
    max_new_tokens: int,
    checkpoint: str | None,
    interactive: bool,
    as_json: bool,
    allow_code: bool,
) -> Outcome:
    """Answer a prompt or chat, with the result of a finished run or a checkpoint of any run."""
    if interactive and as_json:
        _refuse("-i and --json exclude each other", "use -i at a terminal, --json in programs")
    if max_new_tokens < 1:
        _refuse(f"--max-new-tokens is {max_new_tokens}, expected 1 or more", "the default is 64")
    folder = result_run(run_dir, checkpoint)
    consent_to_code(folder, "generate", hooks=False, allowed=allow_code)
    if prompt is None and not interactive:
        prompt = _piped()
    elif prompt is not None and not prompt.strip():
        _refuse("the prompt is empty", "give a PROMPT, pipe one in, or chat with -i")
    require_modules(("torch", "transformers"))
    if not as_json:
        note(f"loading the model of {printable(run_dir)}")
    from launcher.train.results.generate import answer, converse, load_trained

    with output_on_stderr():
        trained = load_trained(folder, note, checkpoint)
    if interactive:
        _greet(chats=trained.chats, writes=trained.writes)
        count = converse(trained, _reader(), _write, max_new_tokens, prompt, images)
        return Outcome({"run_dir": run_dir, "answers": count}, "")
    assert prompt is not None
    text = answer(trained, prompt, max_new_tokens, images=images, second=second)
    given = {"prompt": prompt} if second is None else {"prompt": prompt, "second": second}
    return Outcome({"run_dir": run_dir, **given, "text": text}, text)


def _piped() -> str:
    """The prompt on stdin. Raises RecipeError if there is none."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        _refuse("no prompt", "give a PROMPT, pipe one in, or chat with -i")
    try:
        found = sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        _refuse(f"stdin is not UTF-8: {error}", "encode the prompt as UTF-8")
    if not found.strip():
        _refuse("the prompt on stdin is empty", "give a PROMPT, pipe one in, or chat with -i")
    return found


def _refuse(message: str, hint: str) -> NoReturn:
    raise RecipeError(Problem("usage", message, hint=hint))


def _greet(*, chats: bool, writes: bool) -> None:
    if not writes:
        kind = "each line is classified separately"
    elif chats:
        kind = "a conversation: the model sees the earlier turns"
    else:
        kind = "each line is a separate prompt: the model was not trained on conversations"
    note(f"{kind}. {ENDS}.")


def _reader() -> Callable[[], str | None]:
    """A function that returns the next line; None at the end of the input and for Ctrl-C at the prompt."""
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    if at_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing

    def read() -> str | None:
        try:
            return input("> " if at_terminal else "")
        except (EOFError, KeyboardInterrupt, RuntimeError):  # RuntimeError: stdin is closed
            if at_terminal:
                _write("\n")
            return None
        except UnicodeDecodeError as error:
            _refuse(f"stdin is not UTF-8: {error}", "encode the prompts as UTF-8")

    return read


def _write(piece: str) -> None:
    """Print a part of an answer at once; a closed pipe is no error."""
    with contextlib.suppress(OSError):
        sys.stdout.write(harmless(piece))
        sys.stdout.flush()
