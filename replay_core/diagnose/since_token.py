"""One token from which engine and trainer part, while all before it agrees: over the steps of a run."""

from __future__ import annotations

from collections import Counter

import numpy as np
from msgspec import Struct, field

from replay_core.diagnose.finding import Evidence, share, shown
from replay_core.diagnose.gap import Gap

#: Nats that two forwards of one model come to, and how many times the usual difference of samples that agree is off.
EXACT, TIMES = 1e-3, 20.0
#: Samples that part, and such that do not, before they tell; the share that parts at one token; and how often that
#: token may stand at such places anyway.
PARTED, WHOLE, MOST, ANYWAY = 8, 8, 0.95, 0.6


class SinceToken(Struct):
    """At which token each sample parts, for the first time, and which tokens stand at such places in all samples."""

    at: Counter[int] = field(default_factory=Counter)
    places: Counter[int] = field(default_factory=Counter)
    there: dict[int, Counter[int]] = field(default_factory=dict)
    whole: int = 0
    fine: Counter[int] = field(default_factory=Counter)
    """Tokens of each id that agree, before anything parts."""

    def take(self, between: Gap) -> None:
        batch = between.batch
        if batch.tokens_N is None:
            return
        d_N = np.full(between.both_N.size, np.nan)
        d_N[between.both_N] = np.abs(between.d)
        usual = float(np.median(np.abs(between.d)))
        limit = max(EXACT, TIMES * usual) if usual < EXACT else EXACT
        for span in batch.flat.spans:
            known = np.flatnonzero(between.both_N[span])
            if not known.size:
                continue
            tokens, apart = batch.tokens_N[span][known], d_N[span][known]
            off = np.flatnonzero(apart > limit)
            for place, token in enumerate(tokens.tolist()):
                self.there.setdefault(place, Counter())[token] += 1
            if not off.size:
                self.whole += 1
                self.fine.update(tokens.tolist())
                continue
            first = int(off[0])
            self.at[int(tokens[first])] += 1
            self.places[first] += 1
            self.fine.update(tokens[:first].tolist())

    def told(self) -> tuple[str, str, list[Evidence]] | None:
        """Words, cause and figures; None where no one token tells."""
        parted = sum(self.at.values())
        if parted < PARTED or self.whole < WHOLE:
            return None
        token, count = self.at.most_common(1)[0]
        if count < MOST * parted:
            return None
        # A place where every sample has that token tells of the place.
        anyway = sum(
            many * self.there[place][token] / sum(self.there[place].values()) for place, many in self.places.items()
        )
        if anyway > ANYWAY * parted:
            return None
        fine = self.fine[token]
        figures = [
            shown(f"samples that part at token {token}", share(count, parted)),
            shown("samples that agree throughout", self.whole),
            shown(f"tokens {token} that agree, before anything parts", fine),
        ]
        if fine:
            return (
                f": samples agree up to a token {token}, and part there: some of these ids are not what was sampled",
                f"text was decoded and encoded again, and another token has become {token} (re-tokenised), or ids are "
                "mapped on their way (an added token, a vocabulary that was resized): other tokens "
                f"{token} agree, so that its weights are one on both sides",
                figures,
            )
        return (
            f": samples agree up to a token {token}, and part there in all of them: it is another token on one "
            "side, or "
            "has other weights",
            f"the id {token} stands for another token on one side (an added token, another tokenizer, a re-tokenised "
            "text), or its embedding was not sent to the engine (a vocabulary that was resized)",
            figures,
        )
