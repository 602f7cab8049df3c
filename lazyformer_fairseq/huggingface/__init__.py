"""To and from Hugging Face. Importing it registers the exported models' classes with transformers, where that is there.

``AutoModel.from_pretrained`` then loads what ``lazyformer export --to huggingface`` wrote without trusting the code in
its folder: the same classes come from here.
"""

from lazyformer_fairseq.huggingface.registration import register_when_transformers_is_loaded

register_when_transformers_is_loaded()
