#!/usr/bin/env bash
# Runs `lazyformer pretrain par_bert_base --recipe phases` from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" pretrain par_bert_base "$@" --recipe phases
