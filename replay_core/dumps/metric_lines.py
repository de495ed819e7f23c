"""Lines of metrics: what each trainer prints once per step.

{'loss': 0.01, 'grad_norm': 0.8, 'epoch': 0.1}                transformers, TRL, ms-swift (also in JSON's quotes)
step:3 - actor/pg_loss:0.01 - actor/grad_norm:np.float64(0.8) verl, SkyRL
step:3 - {'policy/final_loss': '0.01'}                        SkyRL
step 3: {'train/loss': 0.01, 'train/grad_norm': 0.8}          slime, miles; `Global step 3: {...}` OpenRLHF
Step 3 | Time: 5.3s | Loss: 0.01 | Grad. Norm: 0.8            prime-rl
iteration 3/ 100 | lm loss: 1.2E+00 | grad norm: 0.8 |        Megatron
step:  3  loss:  1.2  grad_norm: 0.8  tps: 1,234              torchtitan
Step | Training Loss | reward                                 transformers in a notebook, as pasted: a head, then
3    | 0.01          | 0.5                                    rows of numbers (tabs, bars, commas or blanks between)
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from replay_core.regexes import regex

_NUM = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
#: What wraps a number's repr: np.float64(0.1), tensor(0.1, device='cuda:0'), array(0.1).
_WRAPPED = r"(?:(?:np|numpy|torch)\.)?(?:\w{1,16}\()?"

_VERL = regex(r"\bstep:(\d{1,12})((?: - [^\s:]{1,200}:[^\s]+)+)")
_VERL_PAIR = regex(rf" - ([^\s:]{{1,200}}):{_WRAPPED}({_NUM})(?=[\s,)]|$)", re.IGNORECASE)
_NAMED = regex(
    r"\b(?:global[_ ]step|step|rollout|perf|eval|passrate|multi_turn|train|update|iter(?:ation)?) (\d{1,12}): \{",
    re.IGNORECASE,
)
#: SkyRL's mapping behind the step's number.
NUMBERED = regex(r"\bstep:(\d{1,12}) - \{")
_DICT = regex(r"""(?:\{|^)\s*((?:'[^'\n]{1,200}'|"[^"\n]{1,200}"):\s?.*?)(?:\}|$)""")
_DICT_PAIR = regex(
    rf"""(?:'([^'\n]{{1,200}})'|"([^"\n]{{1,200}})"):\s?['"]?{_WRAPPED}({_NUM})['"]?(?=[,}})]|\s*$)""", re.IGNORECASE
)
#: ms-swift names its step beside the last one: 'global_step/max_steps': '5/3766'.
_SWIFT_STEP = regex(r"""['"]global_step/max_steps['"]:\s?['"](\d{1,12})/\d""")
_PIPES = regex(r"\b(?:step|iteration)\s+(\d{1,12})(?:\s?/\s*\d{1,12})?\s*\|(.*)$", re.IGNORECASE)
#: Megatron's evaluation: validation loss at iteration 100 | lm loss value: 1.2E+00 | lm loss PPL: 3.3E+00 |
_MEGATRON_EVALUATES = regex(
    rf"\b(?:validation|test) loss at iteration\s{{1,4}}(\d{{1,12}}).{{0,60}}\|\s{{0,4}}lm loss value: ({_NUM})",
    re.IGNORECASE,
)
#: A share may be printed in hundredths: `Truncated: 16.7%`.
_PIPE_PAIR = regex(rf"([A-Za-z][\w .()/%@-]{{0,60}}?):\s*({_NUM}(?:\s?%)?)", re.IGNORECASE)
_TITAN = regex(r"\bstep:\s+(\d{1,12})((?:\s+\w{1,40}:\s+\S+)+)")
_TITAN_PAIR = regex(rf"(\w{{1,40}}):\s+({_NUM})", re.IGNORECASE)

#: A mapping that names no step is a step's metrics only if it holds one of these: a configuration is a mapping, too.
_TELLING = regex(
    r"(?:^|[/_])(?<!max_)(?<!target_)(?<!init_)(?:loss|grad_norm|reward|rewards|kl|entropy|accuracy)"
    r"(?:/|_std$|_mean$|$)"
)
#: open-instruct's global_step counts episodes, and its training_step the steps.
_STEP_KEYS = ("step", "training_step", "global_step", "current_steps", "global_steps", "_step", "train/global_step",
              "trainer/global_step")  # fmt: skip
#: Metrics of an evaluation, or of the whole run: they begin no step of their own.
_ASIDE = regex(r"^(?:eval|val|test)[_/]|^train_(?:runtime|loss|samples_per_second|steps_per_second)$|^total_flos$")

#: And what only a step of training has beside them.
_OF_A_STEP = regex(r"^(?!eval|val|test|train_)(?:.*/)?(?:loss|grad_norm|lr|learning_rate)(?:/|$)")


#: prime-rl's line of an evaluation: Evaluated aime24 (Step 10) | Policy v10 | 12.09s | Reward 0.3691 | Truncation 0.0%
#: and Evaluated aime24 in 12.09s (Avg@4=0.3691, Pass@4: 0.5)
_EVALUATED = regex(r"\bEvaluated ([\w./-]{1,80}) (?:\([Ss]tep (\d{1,12})\)\s*\||in [\d.]+s\s?\()(.*)$")
_EVALUATED_PAIR = regex(
    rf"\b(reward|score|accuracy|(?:avg|pass|mean)@\d{{1,5}})\s?[:=]?\s?({_NUM}(?:\s?%)?)", re.IGNORECASE
)


def metric_line(line: str) -> tuple[int | None, dict[str, float]]:
    """The step (None: the line names none) and metrics of a line of metrics; no metrics for any other line."""
    if "Evaluated " in line and (match := _EVALUATED.search(line)):
        told = _numbers((f"eval/{match[1]}/{name.lower()}", value) for name, value in _EVALUATED_PAIR.findall(match[3]))
        return int(match[2]) if match[2] else None, told
    if "step:" in line and (match := _VERL.search(line)):
        return int(match.group(1)), _numbers(_VERL_PAIR.findall(match.group(2)))
    if "step:" in line and (match := NUMBERED.search(line)):
        values = _numbers(_pairs(line[match.end() :]))
        return int(match.group(1)), {name: value for name, value in values.items() if name not in _STEP_KEYS}
    if ": {" in line and (match := _NAMED.search(line)) and (end := line.rfind("}")) >= match.end():
        return int(match.group(1)), _numbers(_pairs(line[match.end() : end]))
    if ("':" in line or '":' in line) and (match := _DICT.search(line)):
        return _mapping(line, _numbers(_pairs(match.group(1))))
    if "lm loss value" in line and (match := _MEGATRON_EVALUATES.search(line)):
        return int(match.group(1)), _numbers([("val/lm_loss", match.group(2))])
    if "|" in line and (match := _PIPES.search(line)):
        return int(match.group(1)), _numbers((k.strip(), v) for k, v in _PIPE_PAIR.findall(match.group(2)))
    if "loss:" in line and (match := _TITAN.search(line)):
        return int(match.group(1)), _numbers(_TITAN_PAIR.findall(match.group(2)))
    return None, {}


#: The first column of a table of steps, and what stands behind it. Without bars, tabs or commas names are set apart by
#: blanks, which two names hold.
_HEAD = regex(r"^[|\s]*(?:Step|Epoch|Iter(?:ation)?)\s*(?:[|\t,]|\s)\s*(?:Training Loss|Loss|reward)\b", re.IGNORECASE)
_OF_STEPS = regex(r"^(?:global_?)?(?:step|iter(?:ation)?|epoch)s?$", re.IGNORECASE)
_TWO_WORDS = regex(r"\b(Training|Validation) Loss\b|\bNo log\b")
_NAME = regex(r"^[A-Za-z_][\w ./@()%-]{0,60}$")
_CELL = regex(rf"^{_NUM}$", re.IGNORECASE)
#: Columns of a table that has no column of steps.
_FEWEST = 3
_WIDEST = 4000


def table_head(line: str) -> list[str] | None:
    """The names of a pasted table's columns, the step's first if it has one; None for any other line."""
    if len(line) > _WIDEST:
        return None
    if "oss" not in line and "eward" not in line:
        return _head_of_figures(line)
    names = [re.sub(r"\s*/\s*", "/", name) for name in _cells(re.sub(r"\s/\s", "/", line))]
    if not _HEAD.match(line) and not (
        len(names) >= _FEWEST
        and all(map(_NAME.match, names))
        and re.search(r"[|\t,]", line)
        and any(map(_TELLING.search, names))
    ):
        return None
    return ["loss" if name.replace("_", " ").lower() in ("training loss", "loss") else name for name in names]


#: What a table in Markdown may tell of, beside a loss or a reward.
_FIGURES = regex(
    r"(?i)\b(?:kl|entropy|grad_norm|grad norm|score|accuracy|acc|response_length|lr|learning_rate)\w{0,12}\b"
)


def _head_of_figures(line: str) -> list[str] | None:
    """The names of a table between bars whose first column are steps, and of which one at least is a figure's."""
    if "|" not in line or not _FIGURES.search(line):
        return None
    names = [_PLAIN.sub("", cell) for cell in _cells(line)]
    return names if len(names) >= _FEWEST and _OF_STEPS.match(names[0]) and all(map(_NAME.match, names)) else None


#: What Markdown sets around a word; what is said of a row that stands for all after it.
_PLAIN, _ONWARDS = regex(r"[*`]{1,3}"), regex(r"^(\d{1,12})\s?(?:\+|and later|onwards?)$")


def table_row(line: str, names: list[str]) -> tuple[int | None, dict[str, float]]:
    """A row of a table with these columns; no metrics for any other line."""
    cells = [_PLAIN.sub("", cell) for cell in _cells(line)] if "*" in line or "`" in line else _cells(line)
    if len(cells) != len(names):
        return None, {}
    step = cells[0] if _OF_STEPS.match(names[0]) else None
    if step is not None and (later := _ONWARDS.match(step)) is not None:
        step = cells[0] = later[1]
    if step is not None and not step.isdigit():
        return None, {}
    values = _numbers((name, cell) for name, cell in zip(names, cells, strict=True) if _CELL.match(cell))
    if step is not None:
        values.pop(names[0], None)
        return int(step), values
    # Without a step a row is known by its numbers.
    return (None, values) if 2 * len(values) > len(names) else (None, {})


def _cells(line: str) -> list[str]:
    text = line.strip().strip("|")
    if "|" in text or "\t" in text or "," in text:
        return [cell.strip() for cell in re.split(r"[|\t]" if re.search(r"[|\t]", text) else ",", text)]
    return _TWO_WORDS.sub(lambda two: two[0].replace(" ", "_"), text).split()


#: How a table between bars heads a column of one step, or of the model that training began with.
_OF_A_COLUMN = regex(
    r"(?i)^(?:(?:step|iter(?:ation)?|epoch|ckpt|checkpoint)[ _-]?(\d{1,12})|base(?:line)?"
    r"|init(?:ial)?|start)$"
)
_SHARE = regex(rf"^({_NUM}(?:\s?%)?)$", re.IGNORECASE)


def step_columns(line: str) -> list[int] | None:
    """The steps of a table whose columns are steps (2 and more), its rows metrics; None for any other line."""
    if "|" not in line or len(line) > _WIDEST:
        return None
    found = [_OF_A_COLUMN.match(_PLAIN.sub("", cell)) for cell in _cells(line)[1:]]
    steps = [int(each[1] or 0) for each in found if each is not None]
    numbered = sum(1 for each in found if each is not None and each[1])
    return steps if numbered >= 2 and len(steps) == len(found) else None


def column_row(line: str, steps: list[int]) -> tuple[str, list[tuple[int, float]]]:
    """The metric of a row of such a table, and its values by step; no values for any other line."""
    name, *cells = [_PLAIN.sub("", cell) for cell in _cells(line)] if "|" in line else [""]
    if len(cells) != len(steps) or not _NAME.match(name):
        return "", []
    told = ((step, _numbers([(name, cell)])) for step, cell in zip(steps, cells, strict=True) if _SHARE.match(cell))
    return name, [(step, values[name]) for step, values in told if name in values]


#: A trainer's own counter stands in a room: trainer/global_step.
_ITS_STEP = regex(r"""['"]\w{0,40}step['"]:""")


def is_of_an_environment(line: str, values: dict[str, float]) -> bool:
    """Whether a mapping that numbers its step itself has none of what a step of training has: an environment's turn."""
    return "step" in line and _ITS_STEP.search(line) is not None and not any(_OF_A_STEP.search(key) for key in values)


def is_aside(values: dict[str, float]) -> bool:
    """Whether these metrics belong to the step before: an evaluation's, or a summary of the run."""
    return any(_ASIDE.search(key) for key in values) and not any(_OF_A_STEP.search(key) for key in values)


def _mapping(line: str, values: dict[str, float]) -> tuple[int | None, dict[str, float]]:
    if match := _SWIFT_STEP.search(line):
        return int(match.group(1)), values
    for key in _STEP_KEYS:
        step = values.get(key)
        if step is not None and 0 <= step < 1e12 and step == int(step):
            del values[key]
            return int(step), values
    return (None, values) if any(_TELLING.search(key) for key in values) else (None, {})


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(single or double, number) for single, double, number in _DICT_PAIR.findall(text)]


def _numbers(pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, text in pairs:
        try:
            whole = text.replace(",", "")
            found[key] = float(whole[:-1]) / 100 if whole.endswith("%") else float(whole)
        except ValueError:
            continue
    return found
