"""The package of ``docs/add_a_kind.md``: its row."""

from lazyformer_fairseq.patterns.attention_variants import Setting
from lazyformer_fairseq.patterns.kinds import CAUSAL, ENCODER, Kind, register

LOCAL_MEAN = register(
    Kind(
        letter="m",
        name="local mean",
        help="the mean of the values of neighboring tokens",
        source="docs/add_a_kind.md",
        modules=dict.fromkeys((ENCODER, CAUSAL), "my_kinds.local_mean:LocalMean"),
        settings=(Setting("width", default=3, help="window size, including the token itself", unit="tokens", low=1),),
    )
)
