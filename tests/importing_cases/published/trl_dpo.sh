trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B \
    --dataset_name argilla/Capybara-Preferences \
    --num_train_epochs 1 --gradient_checkpointing \
    --beta 0.2 \
    --output_dir Qwen2.5-0.5B-DPO
