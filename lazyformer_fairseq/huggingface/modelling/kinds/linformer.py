"""``s[linformer=k]``: keys and values projected along the text to k positions (Wang et al., 2020, section 4)."""

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..attention import Attend, Attended, Attention, AttentionKind, merge_heads, split_heads
from ..interface import KINDS, PlannedSublayer, Shared


class Linformer(AttentionKind):
    """softmax(Q (E K)^T / sqrt(D)) (F V). Text behind padding moves to the left, so that it meets the same columns.

    Attributes:
        key_projection: E, (k, longest input), or one for each head.
        value_projection: F likewise; missing where it is E.
    """

    def __init__(self, config: PretrainedConfig, planned: PlannedSublayer):
        super().__init__(config, planned)
        share, size = planned.settings["share"], (planned.settings["linformer"], config.max_position_embeddings)
        if share == "none":
            size = (self.num_heads, *size)
        if share == "layers":  # one for the whole network
            name = f"linformer={size[0]}"
            self.key_projection = planned.common.setdefault(name, nn.Parameter(torch.zeros(size)))
            self.common_weights = {"key_projection": name}
        else:
            self.key_projection = nn.Parameter(torch.zeros(size))
        self.register_parameter(
            "value_projection", None if share in ("kv", "layers") else nn.Parameter(torch.zeros(size))
        )

    def init_own_weights(self, std: float) -> None:
        for projection in self.parameters():
            nn.init.normal_(projection, std=std)

    def project(self, x_BTC: Tensor, qkv_proj: nn.Linear, shared: Shared) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, C), keys and values (B, k, C); biases come after the projection."""
        width, time = x_BTC.size(-1), x_BTC.size(1)
        q = nn.functional.linear(x_BTC, qkv_proj.weight[:width], qkv_proj.bias[:width])
        text_BTC = Text.of(shared, time).alone(x_BTC)
        k, v = nn.functional.linear(text_BTC, qkv_proj.weight[width:]).chunk(2, dim=-1)
        _, key_bias, value_bias = qkv_proj.bias.chunk(3)
        return q, self._along(self.key_projection, k) + key_bias, self._along(self._of_values, v) + value_bias

    def attend(self, attention: Attention, inner: Attend) -> Attended:
        output, distribution = inner(attention.with_(added_BNTK=None))  # padding is in none of the keys
        text = Text.of(attention.shared, attention.x_BTC.size(1))
        return Attended(output, ProjectedDistribution(distribution, self._of_values, text))

    @property
    def _of_values(self) -> Tensor:
        return self.key_projection if self.value_projection is None else self.value_projection

    def _along(self, projection: Tensor, x_BTC: Tensor) -> Tensor:
        """(B, k, C)."""
        return merge_heads(project_along(projection, split_heads(x_BTC, self.num_heads)))


class Text(NamedTuple):
    """Where text stands in a batch.

    Attributes:
        is_padding_BT: True at padding; None where there is none.
        comes_from_BT: which place comes to each place when each text moves to the left.
        goes_to_BT: which place comes to each place when it moves back.
    """

    is_padding_BT: Optional[Tensor] = None
    comes_from_BT: Optional[Tensor] = None
    goes_to_BT: Optional[Tensor] = None

    @classmethod
    def of(cls, shared: Shared, time: int) -> "Text":
        padding = shared.padding_mask_BT
        if padding is None:
            return cls()
        places, first = torch.arange(time, device=padding.device), padding.int().argmin(-1, keepdim=True)
        behind, before = places + first, places - first  # modulo T, which ONNX has for numbers alone
        comes_from = torch.where(behind < time, behind, behind - time)
        return cls(padding, comes_from, torch.where(before < 0, before + time, before))

    def alone(self, x_BTC: Tensor) -> Tensor:
        """The same with 0 at padding, each text moved to the left."""
        if self.is_padding_BT is None:
            return x_BTC
        x_BTC = x_BTC.masked_fill(self.is_padding_BT[..., None], 0)
        return x_BTC.gather(1, self.comes_from_BT[..., None].expand_as(x_BTC))

    def back(self, of_alone_BNTK: Tensor) -> Tensor:
        """What is known of each place of :meth:`alone`, at the places before that; 0 at padding."""
        if self.is_padding_BT is None:
            return of_alone_BNTK
        found = of_alone_BNTK.gather(-1, self.goes_to_BT[:, None, None].expand_as(of_alone_BNTK))
        return found.masked_fill(self.is_padding_BT[:, None, None], 0)


class ProjectedDistribution(NamedTuple):
    """P F: a distribution over the k positions, of which F is left to be applied to values."""

    distribution: Any
    projection: Tensor
    text: Text

    def attend(self, v_BNTD: Tensor, dropout: float) -> Tensor:
        """P F V (B, N, T, D)."""
        v_BNTD = split_heads(self.text.alone(merge_heads(v_BNTD)), v_BNTD.size(1))
        return self.distribution.attend(project_along(self.projection, v_BNTD), dropout)

    @property
    def probabilities(self) -> Tensor:
        """P F, (B, N, T, T); rows need not sum to one."""
        probabilities = self.distribution.probabilities
        return self.text.back(torch.matmul(probabilities, first_columns(self.projection, probabilities.size(-2))))


def project_along(projection: Tensor, x_BNTD: Tensor) -> Tensor:
    """(B, N, k, D); a shorter input meets the first columns."""
    time, longest = x_BNTD.size(-2), projection.size(-1)
    if time > longest:
        raise ValueError(f"a sequence of {time} tokens is longer than the {longest} positions that are projected")
    return torch.matmul(first_columns(projection, time), x_BNTD)


def first_columns(projection: Tensor, time: int) -> Tensor:
    """A slice of it would make a graph for an input of any length refuse the longest one."""
    return projection.index_select(-1, torch.arange(time, device=projection.device))


KINDS["linformer"] = Linformer
