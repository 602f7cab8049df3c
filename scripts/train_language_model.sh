#!/usr/bin/env bash
# `lazyformer pretrain`, of a language model, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" pretrain "$@"
