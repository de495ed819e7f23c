"""Where in a run an exception was raised: its frames, and what the run was doing there.

    at = raised(one)
    at.doing      # "while a checkpoint is saved"
    at.own        # the innermost frame that lies in no library: the script's, the framework's, the reward function's

Libraries raise deep below the code that called them. What the run was doing is told by the first frame, from the
innermost on, whose file or function does one thing alone.
"""

from __future__ import annotations

import re

from msgspec import Struct

from replay_core.diagnose.signals import Told
from replay_core.regexes import regex

_FRAME = regex(r'^File "([^"]*)", line (\d+|\?)(?:, in (.*))?$')
#: Where packages lie. A framework that is installed to be edited lies beside the run's own code, and is as good as it.
_LIBRARY = regex(
    r"/(?:site|dist)-packages/|/lib/python\d|^<|/(?:s?bin|Scripts)/[\w.-]+$|/(?:torch|transformers|ray|vllm|sglang|deepspeed)/[\w/]+\.py"
)


class Frame(Struct, frozen=True):
    """One frame of a traceback."""

    file: str
    line: str
    function: str
    code: str = ""

    @property
    def is_own(self) -> bool:
        return _LIBRARY.search(self.file) is None

    @property
    def place(self) -> str:
        """File, line and function in few words."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


_SYNC = "while weights are sent to the engine"
#: What a frame `file, in function` says the run was doing; the first that fits.
_DOING: tuple[tuple[str, str], ...] = (
    (r"(?i)in \w*(?:reward|compute_score|verif|grade|judge)|/\w*(?:reward_func|rewards?|verifier|grader|judge)"
     r"\w*\.py, ", "in the reward function"),
    (r"in _?(?:save_(?:checkpoint|pretrained|model|ckpt|state|hf|file)\w*|\w*_save_checkpoint|_save"
     r"|save_logs_and_ckpt\w*|_?rotate_checkpoints|_serialize\w*|push_to_hub)$", "while a checkpoint is saved"),
    (r"/(?:wandb|mlflow|swanlab|tensorboardX?|trackio|comet_ml)/|in (?:log_metrics|log_history)$",
     "in the tracker of metrics"),
    (r"in \w*(?:update_named_param|update_weights?|sync_weights?|weight_sync|_to_vllm|_to_sglang|broadcast_(?:to"
    r"|param)|refit|(?:start|finish|init)_weight_update"
     r"|update_param_in)\w*$", _SYNC),
    (r"/(?:tokenization_\w+|tokenizers?|processing_\w+|feature_extraction_\w+|image_processing_\w+|image_utils"
     r"|vision_process|chat_template_utils)(?:/\w+)?\.py|/(?:jinja2|PIL|qwen_vl_utils|tokenizers|sentencepiece)/"
     r"|in (?:apply_chat_template|process_vision_info|tokenize\w*)$",
     "while a prompt is made into tokens (template, tokenizer, processor of images)"),
    (r"/(?:datasets|pyarrow|pandas|webdataset|torchdata)/|torch/utils/data/|in (?:__getitem__|\w*collate\w*"
     r"|load_dataset|get_dataset|create_rl_dataset|\w*_?build_dataset|_read_files\w*|make_map_fn|\w*_data(?:set|loader)s?)$",
     "while data is loaded"),
    (r"in (?:\w*from_pretrained|load_(?:checkpoint|state_dict|weights|model|pretrained\w*|model_and_\w+)|_load_\w+"
     r"|get_peft_model|safe_open|_?load_(?:from|optimizer)\w*|build_model\w*|_build_model\w*|resume\w*)$|/safetensors/",
     "while the model is loaded"),
    (r"/(?:hydra|omegaconf|yaml|pydantic)/|argparse\.py|hf_argparser|in (?:parse_args\w*|\w*_parse_args|get_train_args"
     r"|__post_init__)$", "while the configuration is read"),
    (r"^<frozen importlib|, in import_module$|in _call_with_frames_removed$", "while a package is imported"),
    (r"/(?:vllm|sglang|lmdeploy|tensorrt_llm)/", "in the inference engine"),
    (r"(?i)/(?:envs?|environments?|tools?|sandbox|agents?)/|/\w*(?:_env|_tool|sandbox|_agent)\.py"
     r"|in (?:call_tool|execute_tool)\w*$", "in an environment or tool of the agent"),
    (r"in \w*(?:generate|rollout|make_experience|sample_responses)\w*$", "while responses are generated"),
    (r"/optim/|optimizer\w*\.py, .*in (?:\w*step|\w*clip\w*|\w*unscale\w*)|deepspeed/runtime/zero/.*in \w*step"
     r"|in (?:clip_grad_norm\w*|\w*optimizer_step)$", "in the optimizer's step"),
    (r"torch/autograd/|in (?:backward|\w*_backward)$", "in the backward pass"),
    (r"/torch/distributed/|/deepspeed/comm/|in (?:init_process_group|init_distributed|setup_distributed)$",
     "where processes meet (torch.distributed)"),
    (r"in (?:compute_loss|\w*_loss(?:es)?|compute_advantages?\w*|get_batch_logps|\w*logprobs?\w*|compute_log_prob\w*)$",
     "where the loss, its log-probabilities or advantages are computed"),
    (r"/(?:modeling_\w+|flash_attn\w*|peft)/?[\w/]*\.py, .*in forward|in forward$", "in the model's forward"),
    (r"in (?:evaluate|_?validate|evaluation_loop|test)$", "in the evaluation"),
)  # fmt: skip
_COMPILED = tuple((regex(pattern), doing) for pattern, doing in _DOING)
_REWARD, _TOOL = "in the reward function", "in an environment or tool of the agent"
#: Of these only the run's own frames tell: a library's folder may be called so, as the environments of conda are.
_OWN = (_REWARD, _TOOL)


class Raised(Struct, frozen=True):
    """The frames of an exception, outermost first, and what the run was doing; empty where no frame tells."""

    frames: tuple[Frame, ...] = ()
    doing: str = ""

    @property
    def last(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    @property
    def own(self) -> Frame | None:
        return next((frame for frame in reversed(self.frames) if frame.is_own), None)

    @property
    def is_in_reward(self) -> bool:
        return self.doing == _REWARD

    @property
    def words(self) -> str:
        """What the run was doing and where, in words."""
        frame = self.own or self.last
        if frame is None:
            return self.doing
        return f"{self.doing}, in {frame.place}" if self.doing else f"in {frame.place}"


def raised(one: Told) -> Raised:
    """Where it was raised."""
    found: list[Frame] = []
    for text in one.text.splitlines()[1:]:
        if match := _FRAME.match(text):
            found.append(Frame(match[1], match[2], (match[3] or "").strip()))
        elif found and not found[-1].code:
            found[-1] = Frame(found[-1].file, found[-1].line, found[-1].function, text)
    return Raised(tuple(found), _doing(found))


def _doing(frames: list[Frame]) -> str:
    for frame in reversed(frames):
        told = f"{frame.file}, in {frame.function}"
        for pattern, doing in _COMPILED:
            if (doing not in _OWN or frame.is_own) and pattern.search(told):
                return doing
    return ""


#: What the line of code that raised says together with the exception: (both, short, cause, next step). Both are matched
#: as "exception\\ncode of the last frame\\nfunctions, outermost first".
_TOGETHER: tuple[tuple[str, str, str, str], ...] = (
    (r"^(?:\w+\.)*IndexError[^\n]*\n.*(?:image|video|audio)_(?:grid_thw|lengths|sizes)",
     "the prompt has more placeholders of images or videos than were given to the processor",
     "the text holds more placeholder tokens (of images, videos, audio) than there are images or videos beside it: a "
     "sample with two and one file that was loaded, a template that puts them in twice, or texts and files of other "
     "samples",
     "count the placeholders of each text beside its files before the processor is called; look at the first sample "
     "where they differ"),
    (r"^(?:\w+\.)*FileNotFoundError[^\n]*\n.*\b(?:rmtree|rmdir|unlink|os\.remove)",
     "a file or folder that is to be deleted is gone already",
     "what is to be deleted (an old checkpoint, most often) was deleted by somebody else: every rank prunes the same "
     "folder at once, two runs share one output folder, or a clean-up of the disk",
     "let rank 0 alone delete old checkpoints (behind a barrier), or pass over what is gone (ignore_errors=True); an "
     "output folder for each run"),
    (r"^TypeError: '(?:int|numpy\.\w+)' object is not subscriptable\n.*\.size\b",
     "`.size` of an array is a number and has no parts: `.shape` is meant",
     "a mistake of the code: a NumPy array's (or image's list's) .size is one number, where a tensor's .size() is its "
     "shape",
     "write .shape[0] (or len(...)) in that line"),
    (r"^(?:SyntaxError|IndentationError|ValueError: malformed node)[^\n]*\n(?:.*\n)?"
     r".*\b(?:literal_eval|eval|ast|parse)\b",
     "text that is read as Python is none: an answer of the model, or a field of the data, that cannot be parsed",
     "ast.literal_eval (or eval) is given what a model wrote, or an empty text: it raises on all that is no Python "
     "literal",
     "catch it and score such an answer 0, and count how often; print the text at the frame"),
)  # fmt: skip
_BOTH = tuple((re.compile(pattern), said) for pattern, *said in _TOGETHER)
_EXECUTES = regex(r"\b(?:exec|eval)\(")
_UNREADABLE = regex(r"^(?:Syntax|Indentation|Tab)Error\b")
#: A value of a plain type where the line expects another.
_PLAIN = regex(r"^TypeError: '(\w+)' object is not (subscriptable|callable|iterable)")
_SIGN = {"subscriptable": "[", "callable": "(", "iterable": ""}
_DOES = {"subscriptable": "indexed", "callable": "called", "iterable": "looped over"}


def with_code(one: Told, where: Raised) -> tuple[str, str, str] | None:
    """The cause in a few words and whole, and the next step, where the exception and the line that raised it tell them
    together; None of most.
    """
    frame = where.own if where.own is not None and where.last is not None else where.last
    if frame is None or where.last is None:
        return None
    first = one.text.splitlines()[0]
    if _UNREADABLE.match(first) and not where.last.function and not where.last.file.startswith("<"):
        return (
            "the code itself cannot be read as Python, and nothing of it has run",
            "a mistake of writing in that file (indentation, a bracket, a merge's marks), or code for a newer Python",
            f"python -m py_compile {where.last.file}; look at line {where.last.line} and above; python --version",
        )
    if where.last.file.startswith("<str") and any(
        "exec(" in each.code or "eval(" in each.code for each in where.frames
    ):
        return (
            "a piece of code that was executed from a text fails (a tool's call or an answer of the model)",
            "what a model wrote was run by exec or eval and raised: a name that the restricted namespace lacks, or "
            "simply wrong code",
            "catch it where it is executed, give the model its words back (or score it 0), and count how often",
        )
    code = " ".join(dict.fromkeys([where.last.code, frame.code]))
    both = f"{first}\n{code}\n{' '.join(each.function for each in where.frames[-6:])}"
    for pattern, (short, cause, next_step) in _BOTH:
        if pattern.search(both):
            return short, cause, next_step
    plain = _PLAIN.match(first)
    # A script that was changed while it ran shows another line than the one that raised.
    if plain and where.last.is_own and plain[1] != "NoneType" and _SIGN[plain[2]] in where.last.code:
        return (
            f"a value of type {plain[1]} is {_DOES[plain[2]]} in `{where.last.code[:80]}`",
            f"a mistake of the code, or a field of another type than it expects: something in that line is a "
            f"{plain[1]}, and is {_DOES[plain[2]]}",
            f"print the types of what {where.last.file}:{where.last.line} takes",
        )
    return None


def _by_whom(where: Raised) -> str:
    """Whose code raised, and with what in hand, in words: what a user changes lies in the outermost of his own frames
    below the framework's, or in what the framework was configured with.
    """
    last, own = where.last, where.own
    if last is None:
        return ""
    named = _FRAMEWORK.search(last.file)
    package = named[1] if named else ""
    if last.is_own and not package:
        return ": in code of the run itself, not of a library"
    if own is not None and own is not last and not _FRAMEWORK.search(own.file):
        code = f", `{own.code[:80]}`" if own.code else ""
        return f": in {package or 'a library'}, of what {own.place} gives it{code}"
    return f": in {package or 'a library'} itself, of what the configuration or the data gives it"


#: Classes of exceptions, and what each says of the code that raised it.
_KINDS: tuple[tuple[str, str], ...] = (
    (r"(?:Name|UnboundLocal)Error", "a name is used that was never set: a mistake of the code"),
    (r"(?:Syntax|Indentation|Tab)Error", "text that is read as Python is none"),
    (r"(?:Type|Attribute)Error", "a value is of another kind than the line expects: a mistake of the code that calls "
     "it, or a version of a library that it was not written for"),
    (r"(?:Key|Index|Lookup)Error", "something is looked up that is not there"),
    (r"(?:Import|ModuleNotFound)Error", "a package is missing or of another version"),
    (r"NotImplementedError", "what is asked for is not made for this case"),
    (r"(?:OS|IO|Permission|FileNotFound|FileExists|BlockingIO)Error", "the operating system refuses: a file, a program "
     "or a device"),
    (r"(?:Timeout|Connection\w*|HTTP\w*|URL)Error|Timeout\b", "another process or server does not answer"),
    (r"(?:Overflow|FloatingPoint|Arithmetic|Decimal)\w*", "a number is not what can be computed with"),
    (r"Unicode\w*Error", "bytes that are no text are read as text"),
    (r"(?:Assertion|Value|Runtime)Error", "a value, shape or state is refused there"),
)  # fmt: skip
#: Frameworks of training by their folders: their code refuses what a configuration or a data set gives it.
_FRAMEWORK = regex(
    r"/(verl|openrlhf|slime|trl|deepspeed|skyrl\w*|areal|prime_rl|nemo_rl|llamafactory|swift|rllm|miles|roll|unsloth\w*"
    r"|open_instruct|open_r1|torchtune|vllm|sglang|transformers|accelerate|peft|datasets|ray|torch|megatron)/(?=\w)"
)
_CLASS = regex(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)")
_ENDS_A_PROGRAM = regex(r"SystemExit|KeyboardInterrupt")


def unknown(one: Told, where: Raised) -> tuple[str, str] | None:
    """Cause and next step of an exception whose text nothing is known of: its class and its frames tell. None without
    frames.
    """
    frame = where.own or where.last
    if frame is None or _ENDS_A_PROGRAM.match(one.text):
        return None
    if where.doing == _SYNC:
        return (
            f"the weight update of the engine failed, in {frame.place}: what is sent does not fit what the engine "
            f"holds "
            "(a name, a shape, the part of a tensor-parallel rank or an expert), the engine's version takes updates "
            "otherwise, or two updates overlap",
            f"read {frame.file}:{frame.line}; compare names and shapes of both sides (rldbg weights) and the "
            f"versions that "
            "the trainer pins; stop the run where an update fails: the engine goes on with old weights",
        )
    found = _CLASS.match(one.text)
    kind = found[1].rpartition(".")[2] if found else ""
    says = next((says for pattern, says in _KINDS if re.fullmatch(pattern, kind)), "")
    whose = says or "its own message says what is wrong"
    return (
        f"it was raised {where.words}; {whose}{_by_whom(where)}",
        f"read {frame.file}:{frame.line}" + (f", `{frame.code[:80]}`" if frame.code else "")
        + "; print what that line is given; python -m pdb -c continue SCRIPT stops there",
    )  # fmt: skip
