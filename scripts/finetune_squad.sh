#!/usr/bin/env bash
# `lazyformer finetune-squad`, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" finetune-squad "$@"
