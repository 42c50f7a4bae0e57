"""Which parameters of a request change the distribution that tokens are sampled from, as
`sampling_params` tells them.
"""

NEUTRAL: dict[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
}
"""Parameter -> the values at which it changes nothing. `min_tokens` forbids the end of the answer
for so many tokens."""

CONSTRAINED = "constrained"
"""Number of other fields of the request that may change the distribution: a grammar, biases, whatever the
environment's side does not know to be harmless."""
