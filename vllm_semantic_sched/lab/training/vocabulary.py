"""The student's vocabulary: the pieces of the encoder's 250,000 that the covered languages need.

Texts are lowercased, so that capitals need no pieces of their own and shouting reads like speech.
"""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vllm_semantic_sched.lab.training.e5 import Pieces

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""The special tokens; their ids are their places."""


def chosen_pieces(
    pieces: Pieces, labeled: Sequence[str], texts: Mapping[str, Sequence[str]], size: int
) -> list[int]:
    """Ids of the `size` pieces to keep, the special ones first.

    Every single character stays, so that no word of a known script is unknown, and every piece of
    the `labeled` texts. The other places go to the languages of `texts` in equal shares, each
    taking its most frequent pieces.
    """
    kept = dict.fromkeys(pieces.special)
    for piece, text in enumerate(pieces.texts):
        if len(text.removeprefix("▁")) <= 1 and text == text.lower():
            kept[piece] = None
    tokenizer = piece_tokenizer(pieces, range(len(pieces.texts)))

    def by_frequency(sample: Sequence[str]) -> list[int]:
        counts: Counter[int] = Counter()
        for encoding in tokenizer.encode_batch(list(sample), add_special_tokens=False):
            counts.update(encoding.ids)
        return [piece for piece, _ in counts.most_common()]

    kept.update(dict.fromkeys(by_frequency(labeled)[: size - len(kept)]))
    ranked = [by_frequency(sample) for sample in texts.values()]
    # The first choice of every language, then the second of every language, and so on.
    for _, piece in heapq.merge(*map(enumerate, ranked)):
        if len(kept) >= size:
            break
        kept[piece] = None
    return list(kept)


def piece_tokenizer(pieces: Pieces, ids: Iterable[int]) -> Tokenizer:
    """A tokenizer over these pieces; token i is piece `ids[i]`."""
    vocabulary = [(pieces.texts[piece], float(pieces.scores[piece])) for piece in ids]
    begin, _, end, unknown = SPECIAL
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=SPECIAL.index(unknown)))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace(Regex(r"\s+"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        special_tokens=[(name, SPECIAL.index(name)) for name in (begin, end)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write it as `transformers.AutoTokenizer` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    begin, pad, end, unknown = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "pad_token": pad,
        "eos_token": end,
        "unk_token": unknown,
    }
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
