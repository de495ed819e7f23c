"""What an exception tells by itself, of whatever library: the two numbers that contradict each other and the settings
that have them, the type that was given and the one that is taken, the device that is not there, the part that a setting
asks for and is not installed, an argument by its new name, and the advice that its own words end with.

    told = by_itself(one, where, overrides)
    told.short, told.cause, told.next_step
"""

from __future__ import annotations

import math
import re

from replay_core.diagnose.misfits import Misfit
from replay_core.diagnose.raised import Raised
from replay_core.diagnose.signals import Told
from replay_core.regexes import regex

#: Arguments that later versions call otherwise, or take elsewhere.
_RENAMED = {
    "evaluation_strategy": "eval_strategy (TrainingArguments, since transformers 4.41; the old name is gone from 4.46)",
    "no_cuda": "use_cpu (TrainingArguments)",
    "warmup_ratio": "warmup_steps, which takes a share, too (TrainingArguments, since transformers 5)",
    "overwrite_output_dir": "nothing: take it out (TrainingArguments, since transformers 5)",
    "per_gpu_train_batch_size": "per_device_train_batch_size (TrainingArguments)",
    "use_auth_token": "token (from_pretrained, load_dataset)",
    "use_flash_attention_2": "attn_implementation='flash_attention_2' (from_pretrained)",
    "load_in_4bit": "quantization_config=BitsAndBytesConfig(load_in_4bit=True) (from_pretrained)",
    "load_in_8bit": "quantization_config=BitsAndBytesConfig(load_in_8bit=True) (from_pretrained)",
    "tokenizer": "processing_class (trainers, since transformers 4.46 and TRL 0.12)",
    "max_seq_length": "max_length (SFTConfig, since TRL 0.20; of the trainer itself never again)",
    "dataset_text_field": "SFTConfig(dataset_text_field=...), no argument of the trainer",
    "packing": "SFTConfig(packing=...), no argument of the trainer",
    "beta": "the trainer's Config (DPOConfig, GRPOConfig), no argument of the trainer",
    "max_prompt_length": "nothing in newer TRL, which cuts no prompts: filter or cut them in the data set",
    "log_with": "report_to (the trainer's Config)",
    "ppo_epochs": "num_ppo_epochs (PPOConfig, since TRL 0.12)",
}
_UNKNOWN = regex(r"(?P<of>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'")
#: An attribute that a class asks of itself.
_OF_OBJECT = regex(r"'(?P<kind>\w+)' object has no attribute '(?P<name>\w+)'")
_PLAIN = frozenset(("NoneType", "str", "list", "dict", "int", "float", "tuple", "bool", "set", "Tensor", "function"))
#: torch's checks of what a function is given: Expected tensor for argument #1 'indices' to have one of ... but got ...
_TYPES = regex(
    r"Expected (?:tensor for )?argument #\d+ '(?P<name>\w+)' .{0,20}?to have (?:one of the following )?scalar types?:? "
    r"(?P<want>[\w, ]+?); but got (?:torch\.)?(?P<got>[\w.]+)"
    r"|expected (?:scalar type|m1 and m2 to have the same dtype|dtype) (?P<dtype>\w+) (?:for \w+ )?but (?:found|got) "
    r"(?:torch\.)?(?P<found>\w+)"
    r"|\b[Ee]xpected (?:object of )?(?:dtype|scalar type) (?P<one>\w+) for (?P<what>\w+)"
)
_FLOATS = regex(r"(?i)float|half|double")
_INTEGERS = regex(r"(?i)\b(?:long|int\w*)\b")
#: A kernel of the CPU that half precision has none of, by what torch calls it.
_ON_CPU = regex(
    r"[\"'](?P<op>[\w-]*(?:_cpu\w*|KernelImpl|_with_gemm|kernel_impl|_lastdim\w*|slow_conv\w*))[\"'] not "
    r"implemented for "
    r"['\"](?P<dtype>Half|BFloat16)['\"]"
)
#: No GPU, in the words of several libraries.
_NO_GPU = regex(
    r"(?i)CUDA is (?:required but )?not available|requires? (?:a )?(?:CUDA|GPU)\b.{0,40}\b(?:but|not)\b"
    r"|no (?:CUDA )?GPU (?:was |is )?(?:found|available|detected)|cannot find any torch accelerator|you need a GPU"
    r"|compiled without GPU support|CUDA (?:runtime |driver )?(?:is )?(?:not found|unavailable)"
    r"|torch\.cuda\.is_available\(\) (?:is|returned|should be|==) ?\w*"
)
#: A part that a setting asks for.
_PART = regex(
    r"(?:(?:extension|module|kernels?|package|library|backend|dependency|plugin|op)s? )?['\"`]?"
    r"(?P<name>[A-Za-z]\w*(?:[._-]\w+)+"
    r"|[A-Za-z]\w{2,})['\"`]?(?: (?:extension|module|kernels?|package|library|backend|dependency|plugin|op)s?)? "
    r"(?:(?:is|are|was|were|could|cannot|can) (?:not|be not|n't)(?: be)?|(?:does not|doesn't) seem to be"
    r"|seems? (?:to be not|not to be))"
    r" (?:found|installed|built|compiled|imported)"
)
_SET_TO = regex(r"(?P<key>\w+)(?: (?:was |is )?set to |=)(?P<value>True|1|on|enabled)\b|use (?P<what>\w+_\w+)\b")
#: An allocation that fails, in words of its own.
_NO_ROOM = regex(
    r"(?i)(?:workspace|buffer|memory|block|cache|tensor|pool)s? (?:can't|can ?not|could not|couldn't) be allocated"
    r"|\b(?:not|no) enough (?:GPU |device |free |CUDA )?memory|insufficient (?:GPU |device )?memory"
    r"|failed to allocate (?:\w+ ){0,4}(?:memory|workspace|buffer)"
)
#: Sizes of two tensors, and counts of two kinds.
_SIZES = regex(
    r"(?i)\b(?P<a>target|input|labels?|logits|mask|prediction|output|index|src|source|value|key|query)s?(?: tensor)?"
    r"(?: batch_| )?\s?(?:size|shape)s? \(?(?:torch\.Size\()?(?P<one>\[?\d[\d, ]*\]?)\)?\)?.{0,60}?"
    r"\b(?P<b>target|input|labels?|logits|mask|prediction|output|index|src|source|value|key|query)s?(?: tensor)?"
    r"(?: batch_| )?\s?(?:size|shape)s? \(?(?:torch\.Size\()?(?P<other>\[?\d[\d, ]*\]?)"
)
_COUNTS = regex(
    r"(?i)(?P<a>[a-z_][\w -]{0,50}?)\s?\((?P<one>\[?\d[\d, ]{0,60}\]?)\)\s?(?P<how>.{0,80}?)\s?"
    r"(?P<b>[a-z_][\w -]{0,50}?)\s?\((?P<other>\[?\d[\d, ]{0,60}\]?)\)"
)
_UNLIKE = regex(
    r"(?i)inconsisten|mismatch|do(?:es)? not match|don't match|should be the same|must be the same|differ|must match"
    r"|not equal|unequal|must equal|must be equal|should (?:equal|match)|same (?:number|length|size)"
)
_NAMED_SIZES = regex(r"\b(?P<name>(?:len\()?[A-Za-z_][\w.\[\]'\"]{0,60}\)?)\s?={1,2}\s?(?P<value>\d{1,12})\b(?!\.\d)")
_FAR_INDEX = regex(r"index (?P<at>\d{1,12}) is out of bounds for (?:dimension|axis) \d+ with size (?P<size>\d{1,12})")
_SETTING = regex(
    r"(?P<a>\w*(?:max|limit|min)\w*_\w+|[Uu]ser-specified \w+)\s?\(?\s?=?(?P<one>\d{2,9})\)? is (?:greater|larger"
    r"|longer|more) than "
    r"(?:the )?(?P<b>(?:derived )?\w*max\w*)\b.{0,80}?(?P<other>\d{2,9})"
)
_OF_TEXT = regex(
    r"can't multiply sequence by non-int of type '(?P<by>float)'"
    r"|'(?P<op>[<>]=?|[-+*/])' not supported between instances of '(?P<a>\w+)' and '(?P<b>\w+)'"
    r"|unsupported operand type\(s\) for (?P<sign>\S+): '(?P<left>\w+)' and '(?P<right>\w+)'"
)
_LENGTHS = regex(
    r"(?i)(?:arrays|lists|columns|sequences|inputs) must (?:all )?(?:be (?:of )?|have )the same (?:length|size)"
    r"|zip\(\) argument \d+ is (?:shorter|longer)|columns? .{0,60}expected length \d+ but got length \d+"
)
_DIMENSIONS = regex(
    r"(?i)same number of dimensions|too many indices for|[Dd]imension out of range|number of dims don't match"
)
#: Sentences of advice.
_ADVICE = regex(
    r"(?:^|(?<=[.;!:] ))((?:Please|To (?:use|fix|avoid|enable|resolve|disable|do)|Try|Consider|Make sure"
    r"|You (?:must|need|should"
    r"|can|have)|Set|Use|Install|Run|Otherwise|Did you mean|Either|Increase|Decrease|Reduce|Add|Pass|Instead"
    r"|If you want"
    r"|Pip install|Update|Upgrade)\b[^\n]{8,240}?(?:[.!?](?= |$)|$))|(?<=: )(`?pip install [^\n`]{3,120}`?)"
)
#: Advice that tells nothing: where an issue is tracked, to ask for help.
_NO_ADVICE = regex(r"(?i)report|issue|track|https?://\S+\s*$|file a bug|contact|see (?:above|below|the)")


def by_itself(one: Told, where: Raised, overrides: str) -> Misfit | None:
    """What it tells; None where its words have none of these forms."""
    first = one.text.splitlines()[0]
    for form in (
        _renamed,
        _written_to_hub,
        _of_zero,
        _returned,
        _of_itself,
        _on_the_cpu,
        _no_gpu,
        _no_room,
        _types,
        _text_as_number,
        _far_index,
    ):
        if (told := form(first, where)) is not None:
            return told
    return _contradicts(first, where, overrides) or _not_there(first)


def not_divisible(first: str, overrides: str) -> str:
    """Which numbers do not divide, and the settings that have them, in words; empty where the text has none."""
    first = first.partition(":")[2] or first
    found = [
        (text, math.prod(map(int, re.findall(r"\d+", text))))
        for text in re.findall(r"\d{1,12}(?: ?[*x\u00d7] ?\d{1,12}){1,4}|(?<![\w.])\d{1,12}(?![\w.]*\w)", first)
    ]
    if len(found) < 2:
        return ""
    (one, a), (two, b) = found[:2]
    if "!=" in first and a != b:
        words = f"{one} is not {two}" + (f" = {b}" if not two.isdigit() else "")
    elif b > 1 and a % b:
        words = f"{one}{f' = {a}' if not one.isdigit() else ''} is no multiple of {two}"
    elif a > 1 and b % a:
        words = f"{two} is no multiple of {one}"
    else:
        return ""
    return words + _settings_of((a, b), overrides)


_ANSWERS = regex(r"(?:^|\.|_)(?:n|num_generations|group_size|n_samples\w*|num_return_sequences|generations)$")
_PROMPTS = regex(r"batch_?size|prompts")


def _settings_of(numbers: tuple[int, ...], overrides: str) -> str:
    """The settings that the text states with one of these numbers, in brackets."""
    stated = [
        (key, int(value))
        for key, value in re.findall(r"(?<![\w.])\+{0,2}((?:[a-z_]\w*\.)*[a-z_]\w*)=(\d{1,12})(?![\w.])", overrides)
        if int(value) > 1
    ]
    keys = [f"{key}={value}" for key, value in stated if value in numbers]
    # What a batch counts are its prompts times their answers.
    many = [(key, value) for key, value in stated if _ANSWERS.search(key)]
    keys += [
        f"{key}={value} x {other}={times}"
        for key, value in stated if _PROMPTS.search(key)
        for other, times in many if value * times in numbers
    ]  # fmt: skip
    return f" ({', '.join(dict.fromkeys(keys[:4]))})" if keys else ""


def advice(first: str) -> str:
    """The advice that an exception's own words hold; empty of most."""
    found = [(match[1] or match[2]).strip() for match in _ADVICE.finditer(first)]
    return next((each for each in found if not _NO_ADVICE.search(each)), "")


def _renamed(first: str, where: Raised) -> Misfit | None:
    found = _UNKNOWN.search(first)
    now = _RENAMED.get(found["name"]) if found is not None else None
    if found is None or now is None:
        return None
    at = where.own or where.last
    return Misfit(
        f"{found['of']}() does not take {found['name']}, which was renamed or moved: now it is {now}",
        f"versions do not fit: the script was written for a version that took {found['name']}; now it is {now}",
        f"change it in {at.file}:{at.line}; or install the version that the script was written for"
        if at is not None
        else "change it in the script; or install the version that the script was written for",
    )


def _of_itself(first: str, where: Raised) -> Misfit | None:
    """An attribute that the code of a class asks of itself and that nothing has set."""
    found, last = _OF_OBJECT.search(first), where.last
    if found is None or last is None or found["kind"] in _PLAIN or not last.is_own:
        return None
    kind, name = found["kind"], found["name"]
    if f"self.{name}" not in last.code:
        return None
    return Misfit(
        f"{kind} asks itself for self.{name}, which nothing has set ({last.file.rpartition('/')[2]}:{last.line})",
        f"a mistake of the project's own code: {last.function} uses self.{name}, and the constructor that ran does not "
        "set it: the file is of two versions (a newer method over an older constructor, a merge, an edit), the class "
        "was not meant to be made this way, or a base class of another version sets it",
        f"grep -n 'self.{name}' {last.file}; compare the file with its repository (git diff, git log); look which "
        "class "
        f"sets {name}, and make that one",
    )


_REFUSES = regex(
    r"\b40[13]\b.{0,40}(?:Client Error|Forbidden|Unauthorized)|Unauthorized|Invalid (?:username|user token)"
)
_HUB = regex(r"huggingface\.co|HfHubHTTPError|hf-mirror|RepositoryNotFound")
_WRITES = regex(r"api/repos/create|/preupload|/commit/|/upload|/lfs/|create_repo|push_to_hub|upload_f\w+|init_hf_repo")


def _written_to_hub(first: str, where: Raised) -> Misfit | None:
    """The hub's refusal of what is written to it, which no licence and no gate is the cause of."""
    calls = " ".join(frame.function for frame in where.frames)
    if not (_REFUSES.search(first) and _HUB.search(first) and (_WRITES.search(first) or _WRITES.search(calls))):
        return None
    return Misfit(
        "the hub refuses to be written to: no valid token with the right to write, and the run is to push there",
        "the trainer is told to push its model to Hugging Face's hub (push_to_hub, hub_model_id, hub_strategy), "
        "and this "
        "process has no token, an expired or mistyped one, one that may only read, or none for that organisation",
        "huggingface-cli login with a token that may write (HF_TOKEN in the worker's environment; huggingface-cli "
        "whoami); "
        "or push_to_hub=False: the training itself needs no hub",
    )


_EXPANDED = regex(r"expanded size of the tensor \((?P<want>\d+)\) must match the existing size \((?P<is>\d+)\)")


def _returned(first: str, where: Raised) -> Misfit | None:
    """As many numbers as a reward function returned, and as many completions as there are."""
    found, last = _EXPANDED.search(first), where.last
    if found is None or last is None or "reward" not in f"{last.code} {last.function}".lower():
        return None
    return Misfit(
        f"a reward function returned {found['is']} numbers for {found['want']} completions",
        "the reward function scores prompts, or one group, or leaves some completions out: the trainer wants one "
        "number for "
        "each completion, in their order",
        "print len(completions) and the length of what it returns; give a number (or None) for every one",
    )


_EMPTY = regex(r"expected a non-empty (?:list|TensorList)")
_ZERO = regex(r"/deepspeed/runtime/(?:zero|hybrid_engine)")


def _of_zero(first: str, where: Raised) -> Misfit | None:
    """An empty list that DeepSpeed's ZeRO-3 puts together: parameters, and no samples."""
    if not _EMPTY.search(first) or not any(_ZERO.search(frame.file) for frame in where.frames[-6:]):
        return None
    during = next((f.function for f in where.frames if re.search("generate|rollout|make_experience", f.function)), "")
    return Misfit(
        f"ZeRO-3 gathers a parameter of which it holds no part{f' (in {during})' if during else ''}",
        "DeepSpeed's ZeRO-3 puts a parameter together from its partitions and has none of it: a module that is shared, "
        "copied or was made after deepspeed.initialize (a frozen reference branch, a value head, an adapter), or "
        "that is "
        "used outside of the engine's own forward, as generation does",
        "ZeRO-2 tells whether it is this; make and share modules before the engine is initialised, or call them under "
        "deepspeed.zero.GatheredParameters; of generation the unwrapped model under it (ds3_gather_for_generation)",
    )


def _on_the_cpu(first: str, where: Raised) -> Misfit | None:
    found = _ON_CPU.search(first)
    if found is None:
        return None
    dtype = {"Half": "fp16", "BFloat16": "bf16"}[found["dtype"]]
    return Misfit(
        f"a model in {dtype} runs on the CPU, where torch has no {found['op']} of that precision",
        f"the weights (or inputs) are {dtype} and lie on the CPU: the model was never moved to the GPU, none is "
        "seen, or "
        f"a part was offloaded; this torch computes {found['op']} of {dtype} on a GPU alone",
        "model.to('cuda') (device_map='auto') and the inputs beside it; print torch.cuda.is_available() and "
        "next(model.parameters()).device; on a CPU load it in float32",
    )


def _no_gpu(first: str, where: Raised) -> Misfit | None:
    if _NO_GPU.search(first) is None:
        return None
    return Misfit(
        "there is no GPU that this process can use, and the code needs one",
        "the machine or notebook's runtime has no NVIDIA GPU, its driver or container does not show it "
        "(CUDA_VISIBLE_DEVICES), or the installed torch is built for the CPU alone; quantised weights (bitsandbytes, "
        "GPTQ, AWQ) and fused kernels have no way around it",
        "nvidia-smi there; python -c 'import torch; print(torch.version.cuda, torch.cuda.is_available())'; choose a "
        "runtime with a GPU, or load without quantisation",
    )


def _no_room(first: str, where: Raised) -> Misfit | None:
    if _NO_ROOM.search(first) is None:
        return None
    return Misfit(
        "out of memory, in a library's own words"
        + (f", {where.doing}" if where.doing else "")
        + ": a workspace or buffer does not fit beside what is held",
        "the GPU's memory is used up where a library asks for a workspace of its own (kernels of an inference engine "
        "or a hybrid engine, a cache for the longest sequence): weights, optimizer and the engine share one GPU",
        "nvidia-smi before that call; a smaller batch and fewer tokens (the workspace is made for the largest), "
        "offload "
        "the optimizer or release the trainer's cache before generation; more GPUs",
    )


def _types(first: str, where: Raised) -> Misfit | None:
    found = _TYPES.search(first)
    if found is None:
        return None
    want = (found["want"] or found["dtype"] or found["one"]).strip()
    got = (found["got"] or found["found"] or "").removeprefix("cuda.")
    name = found["name"] or found["what"] or "a tensor"
    at = where.own or where.last
    here = f"print its dtype and shape in {at.file}:{at.line}" if at is not None else "print its dtype and shape"
    if _INTEGERS.search(want) and (not got or _FLOATS.search(got)):
        ids = "indices" in name or "embedding" in first
        return Misfit(
            f"{'token ids' if ids else name} are {got or 'no integers'} where integers ({want}) are needed",
            "an empty list becomes a float tensor (torch.tensor([])): a sample without a token, as of an empty prompt, "
            "answer or message, in that batch; or ids went through arithmetic, padding or a collator that makes floats",
            f"{here}; look for samples that are empty once they are tokens; .long() where they are made",
        )
    return Misfit(
        f"{name} is {got or 'of another type'} where {want} is needed",
        "two dtypes meet: one part was loaded or made in another precision than the other (a head, an adapter, a mask, "
        "rewards from NumPy), and no autocast is around it",
        f"{here}; cast it where it is made, or run it under autocast",
    )


def _text_as_number(first: str, where: Raised) -> Misfit | None:
    found = _OF_TEXT.search(first)
    if found is None:
        return None
    kinds = {"str", "float"} if found["by"] else {found["a"] or found["left"], found["b"] or found["right"]}
    if "str" not in kinds or not kinds & {"float", "int"}:
        return None
    at = where.own or where.last
    code = f" in `{at.code[:100]}`" if at is not None and at.code else ""
    return Misfit(
        f"a text stands where a number is needed{code}",
        "a setting was read as text: YAML reads 1e-6 as a string (1.0e-6 is a number), an environment variable or a "
        "command line without a type is one, too; or an answer or a field of the data was never made a number",
        "float(...) where the setting is read; write 1.0e-6 in YAML; print the type of each setting of that line",
    )


def _far_index(first: str, where: Raised) -> Misfit | None:
    found = _FAR_INDEX.search(first)
    if found is None or int(found["size"]) < _VOCABULARY:
        return None
    return Misfit(
        f"token id {found['at']} is beyond the vocabulary of {int(found['size']):,}",
        "the ids come from another tokenizer than the model, or tokens were added and the embeddings (and logits) not "
        "resized",
        "compare len(tokenizer) with model.config.vocab_size; resize_token_embeddings(len(tokenizer)), in the "
        "engine, too",
    )


#: No sequence is as long, and vocabularies are.
_VOCABULARY = 30000


def setting_too_large(first: str) -> Misfit | None:
    """A setting that asks for more than the model or another one allows."""
    found = _SETTING.search(first)
    if found is None:
        return None
    a, b = re.sub(r"(?i)^user-specified ", "", found["a"]), found["b"].removeprefix("derived ")
    return Misfit(
        f"{a} is set to {int(found['one']):,}, more than the {int(found['other']):,} that {b} allows",
        f"a setting asks for more than the model (its config.json) or another setting allows: {a}={found['one']}",
        f"{a}={found['other']} or less; a model with a longer context, or its rope scaling where it is made for that",
    )


def _contradicts(first: str, where: Raised, overrides: str) -> Misfit | None:
    """Two sizes or counts that are to be equal and are not."""
    said = first.partition(":")[2].strip() or first
    at = where.own or where.last
    code = f", in `{at.code[:90]}`" if at is not None and at.code and "raise " not in at.code else ""
    print_it = f"print both in {at.file}:{at.line}" if at is not None else "print both where it was raised"
    if (found := _SIZES.search(said)) is not None and found["one"] != found["other"]:
        a, b = found["a"].lower(), found["b"].lower()
        one, other = found["one"].strip(), found["other"].strip()
        extra = [n for n in (re.findall(r"\d+", one), re.findall(r"\d+", other)) if n[-1:] == ["1"]]
        why = (
            "one has a last dimension of 1 that the other lacks: squeeze(-1) it, or unsqueeze the other"
            if len(re.findall(r"\d+", one)) != len(re.findall(r"\d+", other)) and extra
            else "they are of other samples or tokens: a shift by one that only one of them has, padding, a prompt "
            "that "
            "is part of one alone, or a mean that was taken of one"
        )
        return Misfit(f"{a} has the size {one} and {b} {other}{code}", why, print_it)
    if _UNLIKE.search(said) and (found := _COUNTS.search(said)) is not None and found["one"] != found["other"]:
        a, b = _kind(found["a"]), _kind(found["b"])
        pictures = re.search(r"(?i)image|video|audio", f"{a} {b} {found['how']}")
        text = re.search(r"(?i)text|token|prompt|placeholder", f"{a} {b} {found['how']}")
        why = (
            "images (or videos) and texts of the batch are grouped otherwise: the processor wants one list of "
            "images for "
            "each text ([[img1], [img2]]), a flat list is one sample's, and each text as many image tokens as it has "
            "images"
            if pictures and text
            else "both are of the same samples and should be as many: a filter, a repetition per generation, a gather "
            "over ranks or a last batch that is short reached one of them alone"
        )
        return Misfit(
            f"{a} {found['one']} against {b} {found['other']}{code}",
            why + _settings_of(tuple(map(int, re.findall(r"\d+", f"{found['one']} {found['other']}"))), overrides),
            print_it + ("; give images=[[image] for image in images] beside the texts" if pictures and text else ""),
        )
    if first.startswith(("AssertionError", "ValueError", "RuntimeError")):
        sizes = list(dict.fromkeys((m["name"], int(m["value"])) for m in _NAMED_SIZES.finditer(said)))
        if len(sizes) > 1 and len({value for _, value in sizes}) > 1 and len(said) < _SHORT:
            listed = ", ".join(f"{name} = {value}" for name, value in sizes[:4])
            return Misfit(
                f"numbers that should agree do not: {listed}{code}",
                "a check of the code found counts or sizes that contradict each other: of samples, responses or tokens "
                "that were filtered, repeated, gathered or cut in one place and not in the other"
                + _settings_of(tuple(value for _, value in sizes), overrides),
                print_it + "; follow the smaller one back to where it was made",
            )
    if _LENGTHS.search(said):
        return Misfit(
            f"lists that belong together are of different lengths{code}",
            "what is put side by side (columns, prompts and responses, metrics of steps) has more entries in one list "
            "than in another: one was filtered, repeated per generation, appended to twice, or ended early",
            print_it.replace("both", "their lengths"),
        )
    if _DIMENSIONS.search(said):
        return Misfit(
            f"a tensor has other dimensions than the code expects{code}",
            "one dimension too few or too many: of a batch of one, a squeeze without its dimension, rows that were "
            "packed into one, an index that needs unsqueeze(-1)",
            print_it.replace("both", "the shapes"),
        )
    return None


#: Characters of a message that is a check's own values, and no report.
_SHORT = 400


def _kind(words: str) -> str:
    """The last words of what is counted: `inconsistently sized batches of images` are images."""
    words = re.sub(r"(?i).*\b(?:of|and|but|with|in|the|the number of)\s", "", words.strip()) or words.strip()
    return words.strip(" ,;:")


def _not_there(first: str) -> Misfit | None:
    """A compiled part or a package that is not installed, and the setting that asks for it."""
    found = _PART.search(first)
    if found is None:
        return None
    name, asked = found["name"], _SET_TO.search(first)
    key = (asked["key"] or asked["what"]) if asked is not None else ""
    return Misfit(
        f"{name} is not installed" + (f", which {key} asks for" if key else ""),
        (f"{key} is on" if key else "a setting or a default is on")
        + f" that needs {name}, a compiled part (or package) "
        "that this environment does not have: never installed, or built for another torch or CUDA",
        (f"{said.rstrip('.')}; " if (said := advice(first)) else "")
        + (f"or switch {key} off" if key else f"install {name} for this torch and CUDA, or switch off what needs it"),
    )
