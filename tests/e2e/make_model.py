"""Makes a model of 200 KB with random weights, the same on every run: `python make_model.py FOLDER`.

Run by setup_vllm.py with the Python that vLLM is installed in. What the model says is noise; what it takes is a real
tokenizer, a real chat template and a real forward pass, with no model hub.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SENTENCE = "The quick brown fox jumps over the lazy dog while the queue waits, and the urgent request goes first."
MAX_POSITIONS = 4096


def main(folder: Path) -> None:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    # The byte alphabet makes every text encodable; the few merges make tokens longer than a byte.
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([SENTENCE], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=STOP, pad_token=END, model_max_length=MAX_POSITIONS
    )
    tokenizer.chat_template = CHAT_TEMPLATE

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
