"""PAR's fine-tuning on SQuAD v1.1 (arXiv 2009.04534, section 3.3 and Table 4), and what the table says.

The paper prints the metric, F1 on the development set, and that it is the median of five runs. It does not print the
rest: epochs, rate, warm-up and sizes of windows are those of BERT's run_squad.py, the batch that of BERT's paper.
"""

LEARNING_RATES = (3e-5,)
SEEDS = (1, 2, 3, 4, 5)
EPOCHS = 2
WARMUP = 0.1
PAPER_F1 = {"DistilBERT": 86.9, "BERT Base": 88.4, "PAR BERT Base": 87.4}
OFFICIAL_QUESTIONS = {"train": 87_599, "valid": 10_570}
