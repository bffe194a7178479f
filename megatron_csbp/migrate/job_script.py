# SPDX-License-Identifier: Apache-2.0
"""A shell script, or a file of flags, as a block-diffusion job."""

from collections.abc import Sequence

from megatron_csbp.migrate.edits import Edit, Migration, removal
from megatron_csbp.migrate.rules import FlagRules, Setting, Verdict, Wanted, length_problem, own_flags
from megatron_csbp.migrate.shell_script import Given, Launch, read_launch

_CONTEXT = "--context-parallel-size"
_ENTRY = "-m megatron_csbp.launch"
_OTHER_MODELS = ("bert", "t5", "ict", "retro", "vlm", "vision", "mamba", "hybrid")


def migrate_script(name: str, text: str, rules: FlagRules, wanted: Wanted) -> Migration:
    """Return what changes in a script.

    Args:
        name: of the file.
        text: of the file.
        rules: of the flags.
        wanted: what the job shall have.

    Raises:
        ValueError: the file starts no training script and holds no flags.
    """
    launch = read_launch(text)
    if launch is None:
        raise ValueError(
            f"{name} starts no training script (pretrain_*.py after torchrun, python or srun), and is no file of "
            "flags: give the file that holds the launch command, or a .yaml file of --yaml-cfg."
        )
    settings = [Setting(given.flag, given.values) for given in launch.flags]
    by_name = {setting.name: setting.values for setting in settings}
    edits, obstacles = _judged(text, launch, rules.verdicts(settings))
    context = _context(text, launch, wanted, edits)
    added = own_flags(wanted, context)
    edits += _added(text, launch, added)
    obstacles += _of_the_script(launch)
    size = int(context) if context is not None and context.isdigit() else _known_context(launch)
    problem = length_problem(by_name, size, wanted.block_size)
    obstacles += [problem] if problem is not None else []
    dropped = {verdict.setting.name for verdict in rules.verdicts(settings) if verdict.replacement == ""}
    flags, unknown = _flags_after(launch, dropped, wanted)
    known = [f"--context-parallel-size {size}"] if wanted.context is not None else []
    known += [f"--bp-size {size}"] if size > 1 else []
    notes = _notes(launch, context)
    flags += [word for flag in [*known, f"--diffusion-block-size {wanted.block_size}"] for word in flag.split()]
    return Migration(name, text, edits, obstacles, notes, flags, unknown)


def _judged(text: str, launch: Launch, verdicts: Sequence[Verdict]) -> tuple[list[Edit], list[str]]:
    edits: list[Edit] = []
    obstacles: list[str] = []
    for verdict in verdicts:
        for given in launch.flags:
            if given.flag != verdict.setting.name or given.values != verdict.setting.values:
                continue
            said = " ".join([given.flag, *given.raw])
            if verdict.replacement is None:
                obstacles.append(f"line {given.line}: {said}: {verdict.reason}")
            elif verdict.replacement:
                reason = f"{said} -> {verdict.replacement}: {verdict.reason}"
                edits.append(Edit(given.start, given.end, verdict.replacement, reason, given.line))
            else:
                edits.append(removal(text, given.start, given.end, f"{said} is left out: {verdict.reason}"))
    return _distinct(edits), list(dict.fromkeys(obstacles))


def _distinct(edits: Sequence[Edit]) -> list[Edit]:
    return list({edit.start: edit for edit in edits}.values())


def _context(text: str, launch: Launch, wanted: Wanted, edits: list[Edit]) -> str | None:
    """Return the context size as it will be written; change the flag that is there, if another is wanted."""
    given = [flag for flag in launch.flags if flag.flag == _CONTEXT]
    if wanted.context is None:
        if not given or _known(given[-1]) == "1":
            return None
        raw = text[given[-1].start : given[-1].end].partition("=" if "=" in given[-1].flag else " ")[2].strip()
        return raw or " ".join(given[-1].raw)
    if given:
        said = f"{_CONTEXT} {wanted.context}"
        reason = f"{_CONTEXT} {' '.join(given[-1].raw)} -> {wanted.context}: --context-size asks for it"
        edits.append(Edit(given[-1].start, given[-1].end, said, reason, given[-1].line))
    return str(wanted.context)


def _known(given: Given) -> str | None:
    return given.values[0] if given.values else None


def _known_context(launch: Launch) -> int:
    """Return the context size of the job if the script says it, else 1."""
    values = [_known(given) for given in launch.flags if given.flag == _CONTEXT]
    return int(values[-1]) if values and values[-1] is not None and values[-1].isdigit() else 1


def _added(text: str, launch: Launch, added: Sequence[tuple[str, str]]) -> list[Edit]:
    """Put the entry before the training script, and the new flags behind it; in a file of flags, at its end."""
    has_context = any(given.flag == _CONTEXT for given in launch.flags)
    words = [flag for flag, _ in added]
    bp_size = next((flag for flag in words if flag.startswith("--bp-size")), None)
    if bp_size is not None and not has_context:
        words.insert(0, f"{_CONTEXT} {bp_size.removeprefix('--bp-size ')}")
    reasons = "; ".join(f"{flag}: {reason}" for flag, reason in added)
    if launch.script is None:
        end = max((given.end for given in launch.flags), default=len(text))
        line = text.count("\n", 0, end) + 1
        return [Edit(end, end, "\n" + "\n".join(words), f"added {reasons}", line)]
    script = launch.script
    entry = Edit(script.start, script.start, f"{_ENTRY} ", _entry_reason(launch), script.line)
    flags = Edit(script.end, script.end, f" {' '.join(words)}", f"added {reasons}", script.line)
    return [entry, flags]


def _entry_reason(launch: Launch) -> str:
    return (
        f"{_ENTRY} before {launch.path}: runs it unmodified, with this package's flags, datasets and forward step "
        "(from Megatron-LM core_r0.19)"
    )


def _of_the_script(launch: Launch) -> list[str]:
    other = [name for name in _OTHER_MODELS if name in launch.path.rpartition("/")[2]]
    if not other:
        return []
    return [
        f"{launch.path} trains another kind of model ({other[0]}): block diffusion is for decoder-only GPT models; "
        "start from pretrain_gpt.py"
    ]


def _notes(launch: Launch, context: str | None) -> list[str]:
    flags = {given.flag for given in launch.flags}
    notes = []
    if context is None:
        notes.append(
            "every sequence stays on one rank (of a tensor- and pipeline-parallel group): --context-size P spreads it"
        )
    if "--load" in flags and "--finetune" not in flags:
        notes.append(
            "--load of an autoregressive checkpoint: add --finetune to the first start, which begins a new run from "
            "its weights; without it the old run's iterations count on"
        )
    return notes


def _flags_after(launch: Launch, dropped: set[str], wanted: Wanted) -> tuple[list[str], list[str]]:
    """Return the flags whose values are known, and the names of the others."""
    known: list[str] = []
    unknown: list[str] = []
    for given in launch.flags:
        if given.flag in dropped or (given.flag == _CONTEXT and wanted.context is not None):
            continue
        if None in given.values:
            unknown.append(given.flag)
        else:
            known += [given.flag, *(value for value in given.values if value is not None)]
    return known, unknown
