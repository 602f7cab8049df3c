#!/usr/bin/env bash
# Runs `lazyformer finetune` from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" finetune "$@"
