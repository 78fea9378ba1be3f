#!/bin/bash
export NCCL_DEBUG=INFO
CONFIG=../trl_sft.yaml
trl sft --config "$CONFIG" \
    --learning_rate 1.0e-4  # over the file
