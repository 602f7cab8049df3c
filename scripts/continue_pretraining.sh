#!/usr/bin/env bash
# `lazyformer pretrain FOLDER DATA`, which goes on with a trained model, from a checkout
exec bash "$(dirname "$0")/lazyformer.sh" pretrain "$@"
