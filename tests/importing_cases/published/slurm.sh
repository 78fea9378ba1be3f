#!/bin/bash
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --gres=gpu:a100:4
#SBATCH --time=24:00:00
set -euo pipefail
module load cuda/12.4
source ~/venv/bin/activate
export HF_HOME=$SCRATCH/hf
export NCCL_DEBUG=WARN
MODEL=openai-community/gpt2
LR=3e-5
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
DISTRIBUTED_ARGS="--nproc_per_node 4 --nnodes 2 --rdzv_endpoint node01:29500"
cd "$(dirname "$0")" && echo "it's $MODEL"

srun torchrun $DISTRIBUTED_ARGS run_clm.py \
    --do_train \
    --model_name_or_path "$MODEL" \
    --train_file data/train.txt \
    --learning_rate "$LR" \
    --output_dir "$OUTPUT" > log.txt 2>&1
