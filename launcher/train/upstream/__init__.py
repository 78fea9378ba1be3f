"""Everything that depends on private parts of transformers, trl, peft, accelerate, DeepSpeed or torch.

`seams.py` lists each dependency with its reason and the upstream version it was read from. The other modules
offer them to the rest of launcher.train under public names. tests/contract/test_upstream_seams.py compares
the list with the installed libraries and shows that no other module uses private parts of upstream.
"""
