"""What the settings of an ``s`` choose: a part for each of ``modules/sublayers/attention_kinds``."""
