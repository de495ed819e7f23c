"""Which tokens of which samples: the one answer for compare, diagnose, replay, show and the token view.

`layout`  TokenLayout: which token of which sample stands in every slot of a token axis. Padded on either side, packed
          (by cu_seqlens, sample lengths or position resets), ragged rows end to end, prompt and response side by side.
`batch`   Batch, the samples of one record: its layout, token ids, responses, and `place`: which token each row of any
          tensor speaks of. `values` follows: the numbers over the batch's tokens, with whether anything was said.
          A record without tokens is laid out by a batch of the same micro-batch.
`padding` Padding that no mask names, told from a step's own samples or from runs of one id.

A token is (sample, position), whatever holds it, and everything per token is flat over all tokens of all samples, `_N`,
sample by sample. NaN that was computed is a value; a token that nobody spoke of is marked as not said.
"""
