"""Continues texts and images, token by token: ``lazyformer lm sample``."""

from typing import Optional

import torch
from torch import Tensor

from lazyformer_fairseq.modules.networks.causal_lm import CausalLM
from lazyformer_fairseq.modules.networks.stack import WholeMemory
from lazyformer_fairseq.progress import Progress


@torch.inference_mode()
def continue_tokens(
    model: CausalLM,
    given_BP: Tensor,
    length: int,
    eos: int,
    reach: int,
    allowed_V: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 1,
) -> Tensor:
    """What the model writes behind what is given, ids (B, `length`), the given ones included.

    It remembers what it has read, where its sublayers can attend to a memory; else it reads all anew for each token.

    Args:
        model: in evaluation mode.
        given_BP: ids, P of each; 0 for none.
        eos: id of ``</s>``, from which the first token is predicted.
        reach: most tokens that the memory holds.
        allowed_V: True at ids that may be drawn.
        temperature: by which log-probabilities are divided; 0 for the likeliest token.
        top_k: draw among so many likeliest ones; 0 for all.
        seed: of what is drawn.

    Raises:
        UserError: the model has no places for so many tokens.
    """
    device = next(model.parameters()).device
    chance = torch.Generator(device).manual_seed(seed)
    start = torch.full((len(given_BP), 1), eos, dtype=given_BP.dtype)
    unread = ids = torch.cat([start, given_BP], 1).to(device)
    memory: Optional[WholeMemory] = None if model.decoder.why_no_memory else WholeMemory(reach)
    with Progress(total=length, initial=given_BP.size(1), desc="sampling", unit=" tokens", leave=False) as bar:
        while ids.size(1) <= length:
            features, _ = model(ids if memory is None else unread, memory=memory, features_only=True)
            if memory is not None:
                memory.seen += unread.size(1)
            scores = model.softmax.log_probabilities(features[:, -1], model.decoder.embedding)
            unread = _drawn(scores.masked_fill(~allowed_V.to(device), -torch.inf), temperature, top_k, chance)
            ids = torch.cat([ids, unread], 1)
            bar.update()
    return ids[:, 1:].cpu()


def _drawn(scores_BV: Tensor, temperature: float, top_k: int, chance: torch.Generator) -> Tensor:
    """An id of each row, (B, 1)."""
    if temperature == 0:
        return scores_BV.argmax(-1, keepdim=True)
    if top_k:
        least = scores_BV.topk(min(top_k, scores_BV.size(-1))).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < least, -torch.inf)
    return torch.multinomial((scores_BV / temperature).softmax(-1), 1, generator=chance)
