accelerate launch -m axolotl.cli.train ../axolotl_lora.yml --micro_batch_size 2
