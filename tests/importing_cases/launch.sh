#!/bin/bash
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --gres=gpu:8
MODEL=bigcode/starcoder
export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123
export WANDB_PROJECT=code

deepspeed --num_gpus 8 run_clm.py --do_train \
    --model_name_or_path $MODEL \
    --train_file train.jsonl \
    --block_size 2048 \
    --deepspeed ds_zero2.json \
    --bf16 True \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --learning_rate 1e-5 \
    --num_train_epochs 1 \
    --warmup_ratio 0.03 \
    --evaluation_strategy "no" \
    --optim adamw_torch \
    --output_dir $OUT \
    --config_overrides n_layer=3
