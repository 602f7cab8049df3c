#!/usr/bin/env bash
# Runs `lazyformer pretrain` from a checkout.
exec bash "$(dirname "$0")/lazyformer.sh" pretrain "$@"
