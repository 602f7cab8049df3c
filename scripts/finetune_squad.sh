#!/usr/bin/env bash
# Runs `lazyformer finetune --task squad` from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" finetune --task squad "$@"
