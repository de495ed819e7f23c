"""One batch going through one loaded model: what it answers, how long it took, what it needed.

Three passes: a short probe (warms up, finds the final hidden states, forecasts the capture, checks the
head), the plain pass (timed and weighed; the cell's own answer), and the captured pass (hooks, and the
operators that really ran). Under compile the plain pass is the compiled graph without hooks and the captured
pass another one with them; whether the two agree is part of the answer.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct, field

from replay_core.errors import OwnForwardError, UnavailableError
from replay_core.jobs import LogLine, OnEvent, Progress
from replay_core.replay import attention, compiling, fit, observing
from replay_core.replay.answer import Computed, same_bits
from replay_core.replay.batch import MicroBatch
from replay_core.replay.capture import (
    EACH_OF_TWO,
    Capture,
    Tensors,
    by_key,
    forecast_bytes,
    heads_first,
    modules_matching,
    need_room,
    room_for,
    stored_mib,
)  # fmt: skip
from replay_core.replay.flags import Flags
from replay_core.replay.footprint import PeakMemory, need_logits
from replay_core.replay.frontier import module_of
from replay_core.replay.logprobs import Head, HeadFunction, token_logprobs
from replay_core.replay.model import LoadedModel
from replay_core.replay.packing import Arrangement, Forward, arrange
from replay_core.replay.plan import ReplayPlan
from replay_core.replay.rope import forget_lengths
from replay_core.replay.routing import Imposed, token_numbers
from replay_core.replay.stated import stated
from replay_core.replay.unmasked import states_unmasked
from replay_core.replay.whole_model import WholeModel, has_own_forward, rows_in_order, taken

#: Tokens of the first row that the probe runs.
_PROBE_TOKENS = 16
#: Fewer tokens do not tell whether a model heeds their positions.
_FEWEST_TO_TELL = 4


class BatchReplay(Struct, dict=True):
    """One batch, one model, one set of flags (whose attention is resolved)."""

    plan: ReplayPlan
    flags: Flags
    batch: MicroBatch
    model: LoadedModel
    temperature: float
    on_event: OnEvent
    notes: list[str] = field(default_factory=list)
    routing: Imposed | None = None
    #: What is captured and how: level (none, full, hash), modules, forecast_mib.
    capture: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrangement: Arrangement = arrange(self.batch, self.flags)
        self.modules = modules_matching(self.model.backbone, self.plan.capture)
        longest = int(self.batch.valid_BS.sum(axis=1).max())
        # Padding that is counted, and recorded positions, go further than the tokens of a row.
        reach = 0 if self.flags.positions == "cumsum" else int(self.arrangement.position_ids.max(initial=0)) + 1
        said = [
            fit.need_positions(self.model.backbone, self.model.config, max(longest, reach)),
            fit.mask_note(self.model.causal_lm.config._attn_implementation),
        ]
        self.notes += [note for note in said if note]
        fit.need_padding(self.model.config.vocab_size, self.arrangement)
        self._takes_positions = _takes(self.model.backbone, "position_ids")
        self._listen_to_own_forward()
        if not self._heeds_positions():
            name = type(self.model.backbone).__name__
            drops = "drops position_ids" if self._takes_positions else "takes no position_ids"
            is_pack = any(forward.segments > 1 for forward in self.arrangement.forwards)
            so = "nothing tells it where a sample of the pack begins" if is_pack else "it counts by itself"
            self.notes.append(f"{name} {drops}: {so}")

    def compute(self) -> Computed:
        """Raises OwnForwardError where its model can only be called whole (`called_whole`)."""
        if left_out := self.model.known.get("left_out"):
            raise left_out.with_traceback(None)
        if self.routing is None:
            return self._compute()
        if self.flags.compile != "off":
            raise UnavailableError("recorded routing changes from forward to forward, which a compiled graph does not",
                                   hint="compile=off, or routing=live")  # fmt: skip
        # The probe's few tokens route by themselves: it looks for the head and the final hidden states.
        self._probe(quiet=True)
        with self.routing.on(self.model.backbone):
            answer = self._compute()
        self.notes.append(self.routing.sentence())
        return answer

    def hidden(self) -> tuple[Head, torch.Tensor, torch.Tensor]:
        """(the head, hidden states [N, D] that predict each next token by sample and position, those tokens' ids [N]):
        one plain pass, nothing captured."""
        head, _ = self._probe(quiet=self.routing is not None)
        with contextlib.nullcontext() if self.routing is None else self.routing.on(self.model.backbone):
            _, hidden_BSD = self._timed_pass(compiling.plain, "forwards")
        slots, targets = (torch.from_numpy(part) for part in self.arrangement.next_tokens())
        flat_ND = hidden_BSD.flatten(0, 1)
        return head, flat_ND[slots.to(flat_ND.device)], targets.to(flat_ND.device)

    def _compute(self) -> Computed:
        heads = stated(self.model.config, "num_attention_heads") or 1
        attention.need_memory(self.flags, self.arrangement.forwards, heads)
        forecast_mib = need_logits(self.flags, self._logit_rows(), self.words(), self.plan.logit_chunk)
        head, final_hidden = self._probe()
        if self.flags.compile == "off":
            return self._computed(head, final_hidden, forecast_mib)
        if self.model.computes is not self.model.backbone:
            raise self.not_compiled()
        cold = self.plan.cold_compile
        # Hooks are part of a compiled graph only where Dynamo looks at them.
        with compiling.cache(cold=cold), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            return self._computed(head, final_hidden, forecast_mib)

    def not_compiled(self) -> UnavailableError:
        """Why a model that is called whole is not compiled."""
        name = type(self.model.causal_lm).__name__
        return UnavailableError(
            f"compile={self.flags.compile} compiles a backbone: the forward of {name} is not transformers' own",
            hint="compile=off",
        )

    def _computed(self, head: Head, final_hidden: str, forecast_mib: float) -> Computed:
        compiled = self.flags.compile != "off"
        memory = PeakMemory(self.flags.device)
        counting = compiling.Counting() if compiled else None
        run = self.model.compiled.call(self.flags) if compiled else compiling.plain
        shapes = tuple(forward.input_ids.shape for forward in self.arrangement.forwards)
        known = compiled and self.model.compiled.is_warm(self.flags, shapes)
        first_s, hidden = self._timed_pass(run, "forwards")
        pass_s = first_s
        if compiled and not known:
            pass_s, hidden = self._timed_pass(run, "forwards, compiled")
        started = time.perf_counter()
        logprobs, entropy = self.values(head, hidden) if self.plan.is_critic else self.logprobs(head, hidden)
        steady_s, peak_mib = pass_s + time.perf_counter() - started, memory.mib()
        report = None
        if counting is not None:
            found = counting.report()
            cached = known or bool(found["cache_hits"])
            cost = {"backend": self.flags.compile, "dynamic": self.flags.dynamic}
            report = {**cost, "cache": "cached" if cached else "cold", **found}
            if cached:
                self.notes.append("compile_s is not a first time: the compiler's cache already held this graph")
        seen = observing.observe(self, run, final_hidden, hidden)
        if report is not None:
            report["hooked"] = seen.observer
        compile_s = max(0.0, first_s - pass_s) if compiled else None
        return Computed(
            seen.tensors, final_hidden, logprobs, entropy, seen.attention, steady_s, compile_s, peak_mib, forecast_mib,
            report, seen.observer, {**self.capture, "mib": stored_mib(seen.tensors), "hashes": None}, seen.hashes,
        )  # fmt: skip

    def _listen_to_own_forward(self) -> None:
        if "whole" not in self.model.known:
            self.model.known["whole"] = None
            if has_own_forward(self.model.causal_lm):
                ids_1T = torch.from_numpy(self._probe_ids()[None]).to(self.flags.device)
                whole = WholeModel(self.model.causal_lm)
                try:
                    with torch.no_grad(), _evaluating(self.model.causal_lm), attention.pinned(self.flags):
                        whole(input_ids=ids_1T, attention_mask=None, use_cache=False)
                    self.model.known["whole"] = whole
                except OwnForwardError as error:
                    self.model.known["left_out"] = error.with_traceback(None)
        left_out = self.model.known.get("left_out")
        if left_out and self.plan.backward:
            self.notes.append(f"{left_out.message}: what it does besides is not replayed")

    def _heeds_positions(self) -> bool:
        if not self._takes_positions:
            return False
        if "positions" not in self.model.known:
            ids_1T = torch.from_numpy(self._probe_ids()[None]).to(self.flags.device)
            with torch.no_grad(), _evaluating(self.model.causal_lm), attention.pinned(self.flags):
                # Three tokens tell nothing that could be told apart from counting.
                heeds = ids_1T.shape[1] < _FEWEST_TO_TELL or fit.heeds_positions(self.model.computes, ids_1T)
            self.model.known["positions"] = heeds
        return bool(self.model.known["positions"])

    def _probe_ids(self) -> Any:
        """The first few tokens of the longest row."""
        lengths = self.batch.valid_BS.sum(axis=1)
        row = int(lengths.argmax())
        return self.batch.ids_BS[row][self.batch.valid_BS[row]][:_PROBE_TOKENS]

    # ── forward ──────────────────────────────────────────────────────────────────────────────────

    def inputs(self, forward: Forward) -> dict[str, Any]:
        """The keyword arguments of one call of the backbone."""
        device = self.flags.device
        positions = torch.from_numpy(forward.positions).to(device)
        dtype = next(self.model.causal_lm.parameters()).dtype
        mask = None if forward.attention_mask is None else torch.from_numpy(forward.attention_mask).to(device)
        if forward.allowed_TT is not None:
            mask = attention.additive_mask(forward.allowed_TT, dtype, device)
        # An older transformers does not cut a pack at its positions: there the mask is spelled out.
        elif forward.segments > 1 and mask is None and not attention.masks_by_positions():
            mask = attention.additive_block_mask(positions, dtype)
        given = {"position_ids": positions} if forward.position_ids is not None and self._takes_positions else {}
        return {
            "input_ids": torch.from_numpy(forward.input_ids).to(device),
            "attention_mask": mask,
            **given,
            "use_cache": self.flags.use_cache,
        }

    def forward(self, run: compiling.Call, forward: Forward) -> torch.Tensor:
        """The hidden states [b, s, D] of one of the cell's forwards."""
        if self.routing is not None:
            self.routing.numbers = self._tokens_of(forward)
        forget_lengths(self.model.backbone)
        is_unmasked = self.flags.fault == "state_unmasked"
        inputs, backbone = self.inputs(forward), self.model.backbone
        with (
            attention.pinned(self.flags),
            states_unmasked(backbone) if is_unmasked else contextlib.nullcontext(),
            # No hook goes into a compiled graph.
            rows_in_order(backbone, inputs["input_ids"]) if run is compiling.plain else contextlib.nullcontext(),
        ):
            return run(self.model.computes, inputs)

    def _tokens_of(self, forward: Forward) -> Any:
        """Which token of the batch stands in each slot of one of the cell's forwards."""
        axis, start = self.arrangement.axis, 0
        for one in self.arrangement.forwards:
            end = start + one.input_ids.shape[axis]
            if one is forward:
                numbers = token_numbers(self.arrangement.layout)
                return (numbers[start:end] if axis == 0 else numbers[:, start:end]).reshape(-1)
            start = end
        raise AssertionError("a forward that is none of the cell's")

    def _timed_pass(self, run: compiling.Call, what: str) -> tuple[float, torch.Tensor]:
        """(seconds, hidden states [B, S, D] or [1, T, D]) of every forward of the cell."""
        started = time.perf_counter()
        forwards = self.arrangement.forwards
        parts = []
        self.on_event(Progress(0, len(forwards), what))  # a compiler takes minutes in the first
        for done, forward in enumerate(forwards, start=1):
            parts.append(self.forward(run, forward))
            self.on_event(Progress(done, len(forwards), what))
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.arrangement.axis)
        if self.flags.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, hidden

    # ── logits ───────────────────────────────────────────────────────────────────────────────────

    def words(self) -> int:
        return 1 if self.plan.is_critic else int(self.model.config.vocab_size)

    def _logit_rows(self) -> int:
        return self.arrangement.slots

    def logprobs(self, head: HeadFunction, hidden_BSD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_probs, entropy) on the arrangement's token axes: index t is about token t + 1, 0 where there is none."""
        slots, targets = (torch.from_numpy(part) for part in self.arrangement.next_tokens())
        flat_ND = hidden_BSD.flatten(0, 1)

        def headed(hidden_ND: torch.Tensor) -> torch.Tensor:
            # The head alone: autocast takes a log-softmax in float32 on a GPU.
            with torch.autocast(self.flags.device, torch.bfloat16, enabled=self.flags.fault == "half_head"):
                return head(hidden_ND)

        with attention.pinned(self.flags):
            values = token_logprobs(
                headed,
                flat_ND if self.flags.logits == "whole" else flat_ND[slots.to(flat_ND.device)],
                targets.to(flat_ND.device),
                self.temperature,
                self.plan.logit_chunk if self.flags.logits == "chunked" else None,
                self.on_event,
                rows=slots.to(flat_ND.device) if self.flags.logits == "whole" else None,
                is_half=self.flags.fault in ("half_softmax", "half_head"),
            )
        spread = []
        for value_N in values:
            whole = torch.zeros(self.arrangement.layout.sample_BS.size)
            whole[slots] = value_N
            spread.append(whole.reshape(self.arrangement.layout.shape))
        return spread[0], spread[1]

    def values(self, head: HeadFunction, hidden_BSD: torch.Tensor) -> tuple[torch.Tensor, None]:
        """(a critic's value of every token, on the arrangement's token axes; 0 in padding), None."""
        slots = torch.from_numpy(self.arrangement.layout.slots())
        flat_ND = hidden_BSD.flatten(0, 1)
        with attention.pinned(self.flags):
            values_N = head(flat_ND[slots.to(flat_ND.device)]).float()[:, 0].cpu()
        whole = torch.zeros(self.arrangement.layout.sample_BS.size)
        whole[slots] = values_N
        return whole.reshape(self.arrangement.layout.shape), None

    # ── looking inside ───────────────────────────────────────────────────────────────────────────

    def _probe(self, *, quiet: bool = False) -> tuple[Head, str]:
        """The head, and the name of the final hidden states, from the first few tokens of the first row."""
        known = self.model.known.get("probe")
        if known is None or (self.plan.capture != "none" and self.routing is None) or quiet:
            known = self.model.known["probe"] = self._probed()
        head, final_hidden, capture, width = known
        if quiet:
            return head, final_hidden
        if self.model.known["not_finite"]:
            self.notes.append(self.model.known["not_finite"])
        if head.note:
            self.notes.append(head.note)
        hooked = set(self.modules)
        asked = {name: one for name, one in capture.items() if name == final_hidden or module_of(name) in hooked}
        padded = forecast_bytes(asked, width, self.batch.ids_BS.size)
        self._decide(forecast_bytes(asked, width, self.arrangement.slots), padded)
        return head, final_hidden

    def captured_names(self) -> list[str]:
        """What a capture of every module keeps, by name."""
        known = self.model.known.get("probe") or self._probed()
        return list(known[2])

    def _decide(self, size: int, padded_size: int) -> None:
        """Full or hash, said before anything is captured. Every layout of a batch decides alike: by the padded one."""
        modules, forecast_mib = len(self.modules), size / 2**20
        out, cap_mib, level = Path(self.plan.out), self.plan.capture_cap_mib, self.plan.capture_level
        what, room = room_for(out, cap_mib)
        too_large = max(size, padded_size) > room
        if not modules:
            level = "none"
        elif level == "auto":
            level = "hash" if too_large else "full"
        elif level == "full":
            need_room(size, out, cap_mib)
        if modules:
            over = f", and there is room for {room / 2**20:,.0f} MiB ({what})" if too_large else ""
            kept = ": a digest and statistics of each are kept first" if level == "hash" else ""
            self.on_event(LogLine(f"capturing {modules} modules: about {forecast_mib:,.0f} MiB of tensors{over}{kept}"))
        self.capture = {
            "level": level, "modules": modules, "forecast_mib": forecast_mib,
            "room_mib": room_for(out, cap_mib, EACH_OF_TWO)[1] / 2**20,
        }  # fmt: skip

    def probed_head(self) -> Head:
        """The model's head, as the weights are now."""
        with torch.no_grad():
            return self._probed()[0]

    @property
    def by_head(self) -> frozenset[str]:
        """What a capture of the model has to turn: tensors whose tokens lie behind the heads."""
        found: frozenset[str] = self.model.known.get("by_head", frozenset())
        return found

    @property
    def by_key(self) -> frozenset[str]:
        """What of a model's tensors is no vector of a token: scores by which keys are chosen."""
        if "by_key" not in self.model.known and self._probe_ids().size >= _FEWEST_TO_TELL:
            self.probed_head()
        found: frozenset[str] = self.model.known.get("by_key", frozenset())
        return found

    def _heads_first(self, hooked: list[str], ids_T: Any) -> tuple[frozenset[str], Tensors]:
        """Tensors whose tokens lie behind the heads; and all, of one token fewer than there are."""
        passes: list[tuple[Tensors, int]] = []
        for width in (ids_T.size - 1, ids_T.size):
            some_1T = ids_T[None, :width]
            forward = Forward(some_1T, torch.arange(width)[None].numpy(), None)
            with Capture(self.model.backbone, hooked, width) as capture:
                self.model.computes(**{**self.inputs(forward), "use_cache": False})
            passes.append((capture.tensors, width))
            if not any(one.ndim == 4 and one.shape[2] == width for one in capture.tensors.values()):
                return frozenset(), passes[0][0]
        return heads_first(*passes[1], *passes[0]), passes[0][0]

    def _probed(self) -> tuple[Head, str, Tensors, int]:
        ids_T = self._probe_ids()
        width = ids_T.size
        forward = Forward(ids_T[None], torch.arange(width)[None].numpy(), None)
        backbone = self.model.backbone
        # Dropout would make the head's two ways to its logits differ.
        with _evaluating(self.model.causal_lm), attention.pinned(self.flags):
            hooked = modules_matching(backbone, None)
            shorter: Tensors = {}
            if "by_head" not in self.model.known and width >= _FEWEST_TO_TELL:
                self.model.known["by_head"], shorter = self._heads_first(hooked, ids_T)
            inputs = {**self.inputs(forward), "use_cache": False}
            before = self.model.computes(**inputs).last_hidden_state
            during: list[Any] = []
            keep = lambda _module, _args, put: during.append(getattr(put, "last_hidden_state", None))  # noqa: E731
            with backbone.register_forward_hook(keep):
                logits = self.model.causal_lm(**taken(self.model.causal_lm, inputs)).logits
            with Capture(backbone, hooked, width, self.by_head) as capture:
                hidden = self.model.computes(**inputs).last_hidden_state
            if shorter:
                self.model.known["by_key"] = by_key(capture.tensors, width, shorter, width - 1)
            finite = bool(torch.isfinite(logits).all())
            self.model.known["not_finite"] = None if finite else _not_finite(self.model.causal_lm)
            known, within = self.model.known, during[0] if len(during) == 1 else None
            is_another = within is not None and not same_bits(hidden, within)
            if is_another and same_bits(hidden, before) and known["whole"] is None and "left_out" not in known:
                # The same each time it is called, and another within the model: the model gives it something besides.
                self.model.known["whole"] = WholeModel(self.model.causal_lm)
                return self._probed()
            # A model that alternates is the same every other time: the pass of the logits is asked as well.
            is_repeatable = all(one is None or same_bits(hidden, one) for one in (before, *during))
            head = Head(self.model.causal_lm, hidden, logits, is_repeatable=is_repeatable)
        return head, capture.name_of(hidden) or observing.UNOWNED_HIDDEN, capture.tensors, width


def _takes(backbone: Any, argument: str) -> bool:
    parameters = inspect.signature(backbone.forward).parameters
    return argument in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _not_finite(causal_lm: Any) -> str:
    weight = fit.not_finite(causal_lm)
    if weight is None:
        return "the model computes values that are not finite, from weights that all are"
    return f"the model's weights are not finite: first {weight}"


@contextlib.contextmanager
def _evaluating(causal_lm: Any) -> Any:
    training = causal_lm.training
    causal_lm.eval()
    try:
        yield
    finally:
        causal_lm.train(training)
