"""Convert configs of other trainers (Axolotl, LLaMA-Factory) into ours.

detect            which trainer a file is for
draft             what has been converted so far, and what became of every key of the source
hf_training       settings of the Hugging Face Trainer, which both share; datasets, lora: so for these
axolotl*          one source: its settings, its data sets (`_data`), its keys without counterpart (`_keys`)
llama_factory*    the other
convert           a file in, a Conversion out: the config, its text, and the three lists
"""
