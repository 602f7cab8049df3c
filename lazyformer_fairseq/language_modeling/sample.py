"""Token-by-token sampling of texts and images, for ``lazyformer lm sample``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from lazyformer_fairseq.data.datasets.token_streams import open_tokens
from lazyformer_fairseq.errors import UserError, nearest
from lazyformer_fairseq.language_modeling import images
from lazyformer_fairseq.language_modeling.evaluate import Loaded, load_model, refuse_other_images
from lazyformer_fairseq.modules.networks.stream_memory import WholeMemory
from lazyformer_fairseq.progress import Progress

COMPLETIONS = 4  # per image
COLUMNS = 8  # of images in a picture


@dataclass
class Writer:
    """A language model that continues texts or images.

    Attributes:
        data: the folder of the model's data.
        loaded: the model in evaluation mode, with its dictionary.
        temperature: divisor of the log-probabilities; 0 selects the most likely token.
        top_k: number of most likely tokens to sample from; 0 for all.
        seed: random seed for sampling.
    """

    data: Path
    loaded: Loaded
    temperature: float = 1.0
    top_k: int = 0
    seed: int = 1

    @classmethod
    def load(cls, checkpoint: Path, data: Path, device: Optional[str] = "cpu", **how: Any) -> "Writer":
        """Load a checkpoint's model.

        Args:
            checkpoint: the model's checkpoint file.
            data: the folder of the model's data.
            device: the device name.
            **how: temperature, top_k and seed.

        Raises:
            UserError: :func:`load_model` fails, or the images differ in size from the model's.
        """
        loaded = load_model(checkpoint, data, device)
        refuse_other_images(loaded, data)
        return cls(data, loaded, **how)

    def texts(self, prompt: str, count: int, length: int) -> list[str]:
        """Return `count` texts of `length` tokens each, including the prompt; end-of-line tokens become line breaks.

        Raises:
            UserError: a word of the prompt is not in the dictionary.
        """
        dictionary = self.loaded.dictionary
        words = prompt.split()
        for word in words:
            if word not in dictionary:
                near = nearest(word, dictionary.symbols)
                raise UserError(f"--prompt: {word!r} is not a symbol in {self.data / 'dict.txt'}{near}")
        ids = [dictionary.index(word) for word in words]
        given = torch.tensor([ids] * count, dtype=torch.long)
        texts = []
        for row in self.continued(given, length).tolist():
            symbols = ["\n" if token == dictionary.eos() else dictionary[token] for token in row]
            texts.append(" ".join(symbols).replace(" \n", "\n"))
        return texts

    def draw(self, path: Path, count: int, split: Optional[str] = None) -> None:
        """Sample `count` images, or several completions of the lower halves of a split's images, and write a grid."""
        item = self.loaded.tgt_len
        dictionary = self.loaded.dictionary
        if split is None:
            found = self.continued(torch.empty(count, 0, dtype=torch.long), item)
            images.write_grid(images.as_images(found, dictionary), min(COLUMNS, count), path)
            return
        of_split = open_tokens(self.data / split)
        tokens = np.asarray(of_split[: count * item]).astype(np.int64)
        whole = torch.from_numpy(tokens.reshape(-1, item))
        given = whole[:, : item // 2].repeat_interleave(COMPLETIONS, 0)
        drawn = images.as_images(self.continued(given, item), dictionary)
        rows = images.completion_rows(images.as_images(whole, dictionary), drawn)
        columns = rows.shape[1]
        images.write_grid(rows.reshape(-1, *rows.shape[2:]), columns, path)

    @torch.inference_mode()
    def continued(self, given_BP: Tensor, length: int) -> Tensor:
        """Continue the token ids (B, P) by sampling, and return the whole sequences, (B, `length`).

        If the model's sublayers support a memory, it covers as many tokens as during training; otherwise, the whole
        sequence is recomputed for each token. fairseq's special symbols are never generated, except for line ends in
        texts.

        Raises:
            UserError: the model has too few positions for that many tokens.
        """
        model, dictionary, tgt_len = self.loaded
        device = next(model.parameters()).device
        barred = torch.arange(len(dictionary), device=device) < dictionary.nspecial
        barred[dictionary.eos()] = dictionary[dictionary.nspecial].startswith("#")  # images have no line ends
        generator = torch.Generator(device).manual_seed(self.seed)

        memory = None
        if not model.decoder.why_no_memory:
            memory = WholeMemory(model.decoder.mem_len + tgt_len - 1)
        start = torch.full((len(given_BP), 1), dictionary.eos(), dtype=torch.long)
        ids = torch.cat([start, given_BP], 1).to(device)
        unread = ids

        with Progress(
            total=length,
            initial=given_BP.size(1),
            desc="sampling",
            unit=" tokens",
            leave=False,
        ) as bar:
            while ids.size(1) <= length:
                features, _ = model(
                    ids if memory is None else unread,
                    memory=memory,
                    features_only=True,
                )
                if memory is not None:
                    memory.seen += unread.size(1)
                scores = model.softmax.log_probabilities(features[:, -1], model.decoder.embedding)
                unread = self._drawn(scores.masked_fill(barred, -torch.inf), generator)
                ids = torch.cat([ids, unread], 1)
                bar.update()
        return ids[:, 1:].cpu()

    def _drawn(self, scores_BV: Tensor, generator: torch.Generator) -> Tensor:
        """Sample one id per row, (B, 1)."""
        if self.temperature == 0:
            return scores_BV.argmax(-1, keepdim=True)
        if self.top_k:
            kept = min(self.top_k, scores_BV.size(-1))
            least = scores_BV.topk(kept).values[:, -1:]
            scores_BV = scores_BV.masked_fill(scores_BV < least, -torch.inf)
        probabilities_BV = (scores_BV / self.temperature).softmax(-1)
        return torch.multinomial(probabilities_BV, 1, generator=generator)
