accelerate launch --config_file ../accelerate.yaml --num_processes 8 \
    trl/scripts/sft.py \
    --model_name_or_path bigcode/starcoder \
    --dataset_name trl-lib/Capybara \
    --learning_rate 2.0e-4 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --eos_token '<|im_end|>' \
    --eval_strategy steps \
    --eval_steps 100 \
    --use_peft \
    --lora_r 32 \
    --lora_alpha 16 \
    --lora_target_modules q_proj v_proj \
    --completion_only_loss True \
    --output_dir Qwen2-0.5B-SFT
