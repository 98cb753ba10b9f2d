"""``keepstep completion SHELL``: the lines that teach a shell to complete commands, options, steps, keys and components."""

from __future__ import annotations

from typing import Annotated

import typer

from keepstep.errors import UsageError
from keepstep.format.globs import near

__all__ = ["print_completion"]

# Bash cuts words at colons too, so a URL would be three of them: they are taken from the line itself, and what bash keeps
# of the last one is left out of the answers.
_BASH = r"""_keepstep_completion() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" current="${COMP_WORDS[COMP_CWORD]}" word kept each
    word="${line##*[[:space:]]}"
    [[ $line == *[[:space:]] ]] && line+="''"
    COMPREPLY=( $(env COMP_WORDS="$line" COMP_CWORD=-1 _KEEPSTEP_COMPLETE=complete_bash "$1" 2>/dev/null) )
    [[ $word == *[:=]* && $COMP_WORDBREAKS == *:* ]] || return 0
    kept="${word%"${word##*[:=]}"}"
    for each in "${!COMPREPLY[@]}"; do
        COMPREPLY[each]="${COMPREPLY[each]#"$kept"}"
    done
}
complete -o default -F _keepstep_completion keepstep
"""
_ZSH = r"""#compdef keepstep
_keepstep_completion() {
    eval "$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _KEEPSTEP_COMPLETE=complete_zsh keepstep 2>/dev/null)"
}
if [ "$funcstack[1]" = "_keepstep" ]; then
    _keepstep_completion "$@"
else
    compdef _keepstep_completion keepstep
fi
"""
_FISH = r"""function __keepstep_complete
    set --local --export _KEEPSTEP_COMPLETE complete_fish
    set --local --export _TYPER_COMPLETE_FISH_ACTION $argv[1]
    set --local --export _TYPER_COMPLETE_ARGS (commandline -cp)
    keepstep 2>/dev/null
end
complete --command keepstep --no-files --arguments "(__keepstep_complete get-args)" --condition "__keepstep_complete is-args"
"""
_SCRIPTS = {"bash": _BASH, "fish": _FISH, "zsh": _ZSH}


def _known_shells(incomplete: str) -> list[str]:
    return [name for name in _SCRIPTS if name.startswith(incomplete)]


def print_completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=_known_shells)],
) -> None:
    """Print the lines that teach a shell to complete commands, options, steps, keys and components.

    For bash put them into ~/.local/share/bash-completion/completions/keepstep, for zsh into a file _keepstep in your fpath,
    for fish into ~/.config/fish/completions/keepstep.fish.
    """
    script = _SCRIPTS.get(shell)
    if script is None:
        raise UsageError(f"{shell!r} is none of the shells {', '.join(_SCRIPTS)}{near(shell, list(_SCRIPTS))}")
    typer.echo(script, nl=False)
