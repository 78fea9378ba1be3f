"""Completion scripts for bash, zsh and fish, as text. They are static: the tab key starts no Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = (
    "file",
    "folder",
    "recipe",
    "recipe-or-folder",
    "model",
    "hardware",
    "fix",
    "shipped",
    "choices",
    "text",
)
"""What an argument takes. text: nothing that can be offered."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An option, or an argument without a name."""

    words: tuple[str, ...]
    """Spellings of an option; empty for an argument without a name."""
    help: str
    kind: str = ""
    """One of KINDS; empty for an option without a value."""
    label: str = ""
    """What the help calls the value."""
    choices: tuple[str, ...] = ()
    many: bool = False
    """Whether it may be given again."""
    optional: bool = False
    """Whether its value may be left out."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its arguments."""

    name: str
    summary: str
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]


Names = Mapping[str, Sequence[str]]
"""Kind -> the words that are offered for it: shipped recipes, devices, models, fixes."""


def bash_script(commands: Sequence[Command], names: Names) -> str:
    """The script for bash 3.2 and later."""
    options, values, places = [], [], []
    for command in commands:
        words = " ".join(word for option in command.options for word in option.words)
        options.append(f"        {command.name}) words='{words}';;")
        for option in command.options:
            if option.kind:
                spelled = "|".join(f"{command.name}:{word}" for word in option.words)
                values.append(f"        {spelled}) {_bash_offer(option)};;")
        for number, argument in enumerate(command.positionals):
            place = f"{command.name}:{'*' if argument.many else number}"
            places.append(f"        {place}) {_bash_offer(argument)};;")
    return _BASH.format(
        commands=" ".join(command.name for command in commands),
        options="\n".join(options),
        values="\n".join(values),
        places="\n".join(places),
        **_joined(names),
    )


def _bash_offer(argument: Argument) -> str:
    if argument.kind == "choices":
        return f"kind=choices words='{' '.join(argument.choices)}'"
    return f"kind={argument.kind}"


_BASH = """\
# Completion of effilaunch for bash. Switch it on with:  source <(effilaunch completion bash)

_effilaunch_arguments() {{ # COMMAND: its options, in words
    case $1 in
{options}
    esac
}}

_effilaunch_value() {{ # COMMAND:OPTION: what it takes, in kind; nothing for an option without a value
    case $1 in
{values}
    esac
}}

_effilaunch_place() {{ # COMMAND:NUMBER: what the argument without a name takes, in kind
    case $1 in
{places}
    esac
}}

_effilaunch_offer() {{ # KIND CURRENT: into COMPREPLY, with words for `choices`
    local found
    case $1 in
        recipe|recipe-or-folder|shipped) words='{recipe}';;
        hardware) words='{hardware}';;
        fix) words='{fix}';;
        model) words='{model}';;
        choices) ;;
        *) words=;;
    esac
    case $1 in
        file|folder|recipe|recipe-or-folder|model) compopt -o filenames -o default 2>/dev/null;;
    esac
    while IFS= read -r found; do
        COMPREPLY+=("$found")
    done < <(
        [[ -n $words ]] && compgen -W "$words" -- "$2"
        case $1 in
            file) compgen -f -- "$2";;
            recipe|recipe-or-folder) compgen -f -X '!*.y*ml' -- "$2"; compgen -d -- "$2";;
            folder|model) compgen -d -- "$2";;
        esac
    )
}}

_effilaunch() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} command= option= place=0 kind= words= i word
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        if [[ $word == '=' ]]; then # --on=cpu is three words here
            continue
        elif [[ $word == -* ]]; then
            kind= option=
            _effilaunch_value "$command:$word"
            [[ -n $kind ]] && option=$word
        elif [[ -n $option ]]; then
            option=
        elif [[ -z $command ]]; then
            command=$word
        else
            place=$((place + 1))
        fi
    done
    [[ $cur == '=' ]] && cur=
    kind= words=
    if [[ -z $command ]]; then
        kind=choices words='{commands} --help --version'
    elif [[ $cur == -* ]]; then
        _effilaunch_arguments "$command"
        kind=choices
    elif [[ -n $option ]]; then
        _effilaunch_value "$command:$option"
    else
        _effilaunch_place "$command:$place"
    fi
    _effilaunch_offer "$kind" "$cur"
}}

complete -F _effilaunch effilaunch
"""


def zsh_script(commands: Sequence[Command], names: Names) -> str:
    """The script for zsh, which works when it is sourced and as a file `_effilaunch` on $fpath."""
    listed = "\n".join(
        f"                {_quoted(command.name + ':' + command.summary)}" for command in commands
    )
    cases = []
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_option(option)]
        specs += [_zsh_place(number, a) for number, a in enumerate(command.positionals, start=1)]
        lines = " \\\n".join(f"                        {spec}" for spec in specs)
        cases.append(f"                {command.name})\n                    _arguments \\\n{lines};;")
    return _ZSH.format(commands=listed, cases="\n".join(cases), **_joined(names))


def _zsh_option(option: Argument) -> list[str]:
    again = "*" if option.many else ""
    said = _zsh_words(option.help)
    if not option.kind:
        return [_quoted(f"{again}{word}[{said}]") for word in option.words]
    colon = "::" if option.optional else ":"
    value = f"{colon}{_zsh_words(option.label)}:{_zsh_action(option)}"
    return [_quoted(f"{again}{word}=[{said}]{value}") for word in option.words]


def _zsh_place(number: int, argument: Argument) -> str:
    place = "*" if argument.many else str(number)
    colon = "::" if argument.optional and not argument.many else ":"
    return _quoted(f"{place}{colon}{_zsh_words(argument.label)}:{_zsh_action(argument)}")


def _zsh_action(argument: Argument) -> str:
    if argument.kind == "choices":
        return f"({' '.join(argument.choices)})"
    return {"text": " ", "file": "_files", "folder": "_files -/"}.get(
        argument.kind, f"_effilaunch_{argument.kind.replace('-', '_')}"
    )


def _zsh_words(text: str) -> str:
    """A text inside a specification of _arguments."""
    for mark in "\\:[]":
        text = text.replace(mark, "\\" + mark)
    return text


_ZSH = """\
#compdef effilaunch
# Completion of effilaunch for zsh. Switch it on, after compinit, with:  source <(effilaunch completion zsh)

_effilaunch_shipped() {{
    _values 'shipped recipe' {recipe}
}}

_effilaunch_recipe() {{
    _alternative 'shipped:shipped recipe:({recipe})' 'files:recipe:_files -g "*.y(a|)ml"'
}}

_effilaunch_recipe_or_folder() {{
    _alternative 'shipped:shipped recipe:({recipe})' 'files:recipe:_files -g "*.y(a|)ml"' \\
        'folders:run directory:_files -/'
}}

_effilaunch_model() {{
    _alternative 'known:model:({model})' 'folders:folder:_files -/'
}}

_effilaunch_hardware() {{
    compadd -- {hardware}
}}

_effilaunch_fix() {{
    compadd -- {fix}
}}

_effilaunch() {{
    local curcontext=$curcontext state line
    typeset -A opt_args
    _arguments -C '(- *)--version[print the version]' '(- *)--help[show the help]' \\
        '1:command:->command' '*::argument:->arguments'
    case $state in
        command)
            local -a commands
            commands=(
{commands}
            )
            _describe command commands;;
        arguments)
            case $words[1] in
{cases}
            esac;;
    esac
}}

if [[ $funcstack[1] == _effilaunch ]]; then
    _effilaunch "$@"
else
    compdef _effilaunch effilaunch
fi
"""


def fish_script(commands: Sequence[Command], names: Names) -> str:
    """The script for fish 3 and later."""
    lines = []
    for command in commands:
        said = _fish_words(command.summary)
        lines.append(f"complete -c effilaunch -n __effilaunch_open -a {command.name} -d {said}")
        here = f"complete -c effilaunch -n '__effilaunch_in {command.name}'"
        for option in command.options:
            words = " ".join(f"-l {w[2:]}" if w.startswith("--") else f"-s {w[1:]}" for w in option.words)
            lines.append(f"{here} {words} -d {_fish_words(option.help)}{_fish_value(option)}")
        for number, argument in enumerate(command.positionals):
            offer = _fish_offer(argument)
            if offer is not None:
                most = "" if argument.many else f" {number}"
                place = f"'__effilaunch_in {command.name}{most}'"
                lines.append(f"complete -c effilaunch -n {place} -a {_fish_words(offer)}")
    valued = {
        word for command in commands for option in command.options if option.kind for word in option.words
    }
    return _FISH.format(lines="\n".join(lines), valued=" ".join(sorted(valued)), **_joined(names))


def _fish_value(option: Argument) -> str:
    if not option.kind or (option.optional and option.kind == "text"):
        return ""
    if option.kind == "text":
        return " -x"
    return f" -x -a {_fish_words(_fish_offer(option) or '')}"


def _fish_offer(argument: Argument) -> str | None:
    """What `-a` gets; None where nothing can be offered."""
    if argument.kind == "choices":
        return " ".join(argument.choices)
    return None if argument.kind == "text" else f"(__effilaunch_{argument.kind.replace('-', '_')})"


def _fish_words(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_FISH = """\
# Completion of effilaunch for fish. Switch it on with:  effilaunch completion fish | source

function __effilaunch_words # that are given, less options and their values
    set -l value 0
    for word in (commandline -opc)[2..]
        if string match -q -- '-*' $word
            set value 0
            contains -- $word {valued}; and set value 1
        else if test $value -eq 1
            set value 0
        else
            echo $word
        end
    end
end

function __effilaunch_open
    test (count (__effilaunch_words)) -eq 0
end

function __effilaunch_in # COMMAND [PLACE]: whether it is given, and the next word is that argument of it
    set -l words (__effilaunch_words)
    test "$words[1]" = $argv[1]; or return 1
    test (count $argv) -eq 1; or test (count $words) -eq (math $argv[2] + 1)
end

function __effilaunch_shipped
    printf '%s\\n' {recipe}
end

function __effilaunch_recipe
    __effilaunch_shipped
    __fish_complete_path (commandline -ct) | string match -r '^[^\\t]*(?:\\.ya?ml|/)(?:\\t.*)?$'
end

function __effilaunch_recipe_or_folder
    __effilaunch_shipped
    __fish_complete_path (commandline -ct)
end

function __effilaunch_file
    __fish_complete_path (commandline -ct)
end

function __effilaunch_folder
    __fish_complete_directories (commandline -ct)
end

function __effilaunch_model
    printf '%s\\n' {model}
    __fish_complete_directories (commandline -ct)
end

function __effilaunch_hardware
    printf '%s\\n' {hardware}
end

function __effilaunch_fix
    printf '%s\\n' {fix}
end

complete -c effilaunch -f
complete -c effilaunch -n __effilaunch_open -l version -d 'print the version'
complete -c effilaunch -n __effilaunch_open -l help -d 'show the help'
{lines}
"""

SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


def _joined(names: Names) -> dict[str, str]:
    return {kind: " ".join(words) for kind, words in names.items()}


def _quoted(text: str) -> str:
    """Between single quotes, for zsh."""
    return "'" + text.replace("'", "'\\''") + "'"
