#!/usr/bin/env bash
# Runs `lazyformer pretrain` for a language model from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" pretrain "$@"
