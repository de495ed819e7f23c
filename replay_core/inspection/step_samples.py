"""The samples of a step as a person reads them: turns, rewards, and numbers for each token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from replay_core.decoding import Decoder, find_tokenizer
from replay_core.diagnose.case import Case
from replay_core.documents.version import SCHEMA_VERSION
from replay_core.errors import DumpError, RequestError, SelectionError
from replay_core.export.documents import stamp
from replay_core.export.numbers import clean
from replay_core.inspection import turns
from replay_core.records import Run, Selection

if TYPE_CHECKING:
    from replay_core.diagnose.flat import Array
    from replay_core.documents.samples import SampleEntry, SampleOrder, SamplesDocument, SampleTokens, TokenOfStep

#: Tokens of one sample, samples token by token, tokens of the step that are worst, letters of a text.
MAX_TOKENS, MAX_SHOWN, WORST, MAX_TEXT = 2048, 16, 20, 20_000
#: Recorded texts, the surest first.
_PROMPTS = ("prompt", "prompts", "input", "prompt_text", "problem", "question")
_CONVERSATIONS = ("messages", "conversations", "raw_messages")
_RESPONSES = ("response", "responses", "output", "completion", "completions", "response_text")
#: A policy's ratio is clipped this far from 1 by default (PPO, GRPO).
CLIP = 0.2
#: Columns of tokens, as recorded, and what each is called.
_RECORDED = (
    ("entropy", "entropy"), ("advantages", "advantage"), ("rollout_logprobs", "rollout_logprob"),
    ("old_logprobs", "old_logprob"), ("policy_logprobs", "policy_logprob"), ("ref_logprobs", "ref_logprob"),
    ("token_rewards", "reward"), ("token_loss", "loss"), ("weight_versions", "weight_version"),
)  # fmt: skip


class StepSamples:
    """The samples of the last chosen step that holds any, each number read once.

    Raises:
        DumpError: no record holds samples with tokens or texts.
    """

    def __init__(self, run: Run, step: Selection | None = None, tokenizer: Path | None = None) -> None:
        batch = next((one for one in reversed(list(Case(run, None, step).batches())) if len(one)), None)
        if batch is None:
            raise DumpError("no record holds samples", file=str(run.path), expected="token ids of samples, or texts",
                            hint=f"rldbg ls {run.path}")  # fmt: skip
        self.run, self.batch = run, batch
        self.decoder: Decoder | None = None
        path = tokenizer or find_tokenizer(batch.spine.parts[0].held.record.path, run.models.values())
        if path is not None:
            if tokenizer is not None:
                self.decoder = Decoder(path)
            else:
                with suppress(RequestError):  # nobody asked for the one that lies there
                    self.decoder = Decoder(path)
        columns = batch.columns
        self.counted_N = batch.trained_N if batch.trained_N is not None else batch.response_N
        self.columns: dict[str, Array] = {}
        trainer, rollout = batch.trainer, columns.of("rollout_logprobs")
        if trainer is not None and rollout is not None and trainer.ref is not rollout.ref:
            self.columns["delta_logprob"] = trainer.values_N - rollout.values_N
        policy, old = columns.of("policy_logprobs"), columns.of("old_logprobs")
        if policy is not None and old is not None:
            self.columns["ratio"] = np.exp(np.clip(policy.values_N - old.values_N, -50, 50))
        for name, called in _RECORDED:
            if (column := columns.of(name)) is not None:
                self.columns[called] = column.values_N
        if self.counted_N is not None:
            self.columns["mask"] = self.counted_N.astype(np.float64)
        self.mismatch_B = self._mean(np.abs(self.columns["delta_logprob"])) if "delta_logprob" in self.columns else None
        apart = np.abs(self.columns["ratio"] - 1) > CLIP if "ratio" in self.columns else None
        self.clipped_B = None if apart is None else self._mean(np.where(np.isnan(self.columns["ratio"]), np.nan, apart))
        self.starts_B = None if batch.response_N is None else batch.flat.first(batch.response_N)
        self.prompts, self.responses = self._texts()
        found = (columns.texts(name) for name in _CONVERSATIONS)
        self.conversations = next((texts for texts in found if texts is not None), None)
        if self.responses is None and self.conversations is not None:
            self.responses = [turns.last_said(text) for text in self.conversations]

    def _mean(self, values_N: Array) -> Array:
        """Each sample's mean over what counts and was said [B]."""
        chosen_N = np.isfinite(values_N)
        return self.batch.flat.mean(values_N, chosen_N if self.counted_N is None else chosen_N & self.counted_N)

    def _texts(self) -> tuple[list[str] | None, list[str] | None]:
        """Prompts and responses: as recorded, else the tokens decoded."""
        said = [
            next((found for name in names if (found := self.batch.columns.texts(name)) is not None), None)
            for names in (_PROMPTS, _RESPONSES)
        ]
        if self.decoder is None or self.starts_B is None or not self.batch.spine.has_tokens:
            return said[0], said[1]
        rows = [self.batch.spine.tokens(sample) for sample in range(len(self.batch))]
        for place in (0, 1):
            if said[place] is None:
                cut = [
                    (row[:start] if place == 0 else row[start:])[:MAX_TOKENS].tolist()
                    for row, start in zip(rows, self.starts_B, strict=True)
                ]
                with suppress(RequestError):
                    said[place] = self.decoder.texts(cut)
        return said[0], said[1]

    def document(
        self, *, by: SampleOrder = "order", search: str | None = None, shown: Sequence[int] = (), most: int = 50
    ) -> SamplesDocument:
        """The samples that hold `search`, in order.

        Args:
            shown: samples that are wanted in full; none: the first that is listed.
            most: samples listed.

        Raises:
            SelectionError: there is no such sample; RequestError: nothing is recorded to order them by, or to search.
        """
        batch = self.batch
        for sample in shown:
            if not 0 <= sample < len(batch):
                raise SelectionError(f"there is no sample {sample}", file=str(self.run.path),
                                     expected=f"0 to {len(batch) - 1}", found=str(sample))  # fmt: skip
        notes = []
        if search is not None and self.prompts is None and self.responses is None:
            raise RequestError("there is no text to search", file=str(self.run.path),
                               hint="--tokenizer DIR decodes the tokens")  # fmt: skip
        found = [sample for sample in self._ordered(by) if search is None or self._holds(sample, search)]
        if self.prompts is None and self.responses is None:
            notes.append("no texts are recorded and no tokenizer lies beside the dump: --tokenizer DIR decodes the ids")
        if search is not None and not found:
            notes.append(f"no sample holds {search!r}")
        listed = found[:most]
        worst_by = next((name for name in ("delta_logprob", "ratio", "entropy") if name in self.columns), None)
        doc: SamplesDocument = {
            "schema_version": SCHEMA_VERSION,
            "kind": "samples",
            **stamp(),
            "path": str(self.run.path),
            "step": batch.step,
            "by": by,
            "search": search,
            "total": len(batch),
            "groups": None if batch.group_B is None else len(set(batch.group_B.tolist())),
            "tokenizer": None if self.decoder is None else str(self.decoder.path),
            "samples": [self._entry(sample) for sample in listed],
            "left_out": len(found) - len(listed),
            "tokens": [self._tokens(sample) for sample in (shown or listed[:1])[:MAX_SHOWN]],
            "worst_by": worst_by,
            "worst": [] if worst_by is None or not batch.spine.has_tokens else self._worst(worst_by),
            "notes": notes,
        }
        return clean(doc)

    def _ordered(self, by: SampleOrder) -> list[int]:
        """All samples, in order; those without the number last."""
        batch = self.batch
        keys: Any = {
            "reward": batch.reward_B, "mismatch": self.mismatch_B, "clipped": self.clipped_B,
            "length": self._lengths_B(), "group": batch.group_B, "order": np.arange(len(batch)),
        }[by]  # fmt: skip
        if keys is None:
            raise RequestError(
                f"the samples cannot be put in order by {by}", file=str(self.run.path),
                found=f"no record of the step says their {by}", hint="--by order",
            )  # fmt: skip
        values = np.asarray(keys, dtype=np.float64)
        # The worst stand first: the furthest apart, the longest, the least reward.
        values = values if by in ("order", "group", "reward") else -values
        return [int(one) for one in np.argsort(np.where(np.isnan(values), np.inf, values), kind="stable")]

    def _lengths_B(self) -> Array:
        flat = self.batch.flat
        return flat.lengths_B if self.batch.response_N is None else flat.count(self.batch.response_N)

    def _holds(self, sample: int, text: str) -> bool:
        texts = [rows[sample] for rows in (self.prompts, self.responses, self.conversations) if rows]
        return any(text.casefold() in one.casefold() for one in texts)

    def _entry(self, sample: int) -> SampleEntry:
        batch = self.batch
        parts = {name: batch.columns.per_sample(name) for name in self._reward_names()}
        cut_B = batch.truncated_flag_B

        def number(values_B: Array | None) -> float | None:
            return None if values_B is None or np.isnan(values_B[sample]) else float(values_B[sample])

        def text(rows: list[str] | None) -> str | None:
            return None if rows is None else rows[sample][:MAX_TEXT]

        return {
            "sample": sample,
            "group": None if batch.group_B is None else int(batch.group_B[sample]),
            "prompt": text(self.prompts),
            "response": text(self.responses),
            "tokens": int(self._lengths_B()[sample]) if batch.spine.has_tokens else None,
            "reward": number(batch.reward_B),
            "reward_parts": [
                {"name": name, "value": number(values)} for name, values in parts.items() if values is not None
            ],
            "advantage": number(batch.advantage_B),
            "mismatch": number(self.mismatch_B),
            "clipped": number(self.clipped_B),
            "truncated": None if cut_B is None else bool(cut_B[sample]),
        }

    def _reward_names(self) -> list[str]:
        """Fields of a number for each sample that are called a reward or a score."""
        names = {name for sheet, _ in self.batch.columns.sheets for name in sheet.names()}
        return sorted(name for name in names if name != "reward" and ("reward" in name or "score" in name))

    def _tokens(self, sample: int) -> SampleTokens:
        said = (self.prompts, self.responses) if self.conversations is None else (self.conversations, None)
        prompt, response = (None if rows is None else rows[sample] for rows in said)
        entry: SampleTokens = {
            "sample": sample, "begin": 0, "texts": turns.spoken(prompt, response, MAX_TEXT), "turns": [], "ids": [],
            "pieces": None, "left_out": 0, "columns": [],
        }  # fmt: skip
        if not self.batch.spine.has_tokens:
            return entry
        flat = self.batch.flat
        row = self.batch.spine.tokens(sample)
        here = slice(int(flat.starts_B[sample]), int(flat.starts_B[sample]) + min(int(row.size), MAX_TOKENS))
        ids = [int(one) for one in row[:MAX_TOKENS]]
        pieces = self._pieces(ids)
        begin = 0 if self.starts_B is None else int(self.starts_B[sample])
        counted_T = None if self.counted_N is None else self.counted_N[here]
        return {
            **entry,
            "begin": begin,
            "turns": turns.of_tokens(pieces, begin, counted_T, len(ids)),
            "ids": ids,
            "pieces": pieces,
            "left_out": int(row.size) - len(ids),
            "columns": [
                {"name": name, "values": [None if np.isnan(value) else float(value) for value in values_N[here]]}
                for name, values_N in self.columns.items()
                if not np.isnan(values_N[here]).all()
            ],
        }

    def _pieces(self, ids: list[int]) -> list[str] | None:
        if self.decoder is None:
            return None
        try:
            return self.decoder.pieces(ids)
        except RequestError:
            return None

    def _worst(self, name: str) -> list[TokenOfStep]:
        flat, values_N = self.batch.flat, self.columns[name]
        off_N = np.abs(values_N - 1) if name == "ratio" else np.abs(values_N)
        off_N = np.where(
            np.isfinite(off_N) if self.counted_N is None else np.isfinite(off_N) & self.counted_N, off_N, -1.0
        )
        order = [int(one) for one in np.argsort(-off_N, kind="stable")[:WORST] if off_N[one] >= 0]
        samples, positions = flat.sample_N, flat.position_N
        ids = [int(self.batch.spine.tokens(int(samples[one]))[positions[one]]) for one in order]
        pieces: Sequence[str | None] = self._pieces(ids) or [None] * len(ids)
        return [
            {"sample": int(samples[one]), "position": int(positions[one]), "id": id, "piece": piece,
             "value": float(values_N[one])}
            for one, id, piece in zip(order, ids, pieces, strict=True)
        ]  # fmt: skip
