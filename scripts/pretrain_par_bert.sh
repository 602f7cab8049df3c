#!/usr/bin/env bash
# `lazyformer pretrain-phases par_bert_base`, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" pretrain-phases par_bert_base "$@"
