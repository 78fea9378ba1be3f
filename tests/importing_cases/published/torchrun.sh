torchrun \
    --nproc_per_node 8 pytorch/language-modeling/run_clm.py \
    --model_name_or_path openai-community/gpt2-large \
    --dataset_name Salesforce/wikitext --dataset_config_name wikitext-103-raw-v1 \
    --do_train --bf16 --gradient_checkpointing \
    --warmup_ratio 0.03 --evaluation_strategy no --lr_scheduler_type cosine \
    --report_to wandb tensorboard --fsdp "full_shard auto_wrap" \
    --output_dir /tmp/x --save_steps 5000
