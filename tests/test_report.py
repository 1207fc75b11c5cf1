from vllm_adaptive_tree.report.tokens import Span, coloured, spans


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def test_coloured_text_is_the_decoded_text() -> None:
    text = 'print("naïve 🌳")\n'
    data = list(text.encode())  # one token per byte: characters of up to four tokens
    for width in range(1, 6):
        steps = [data[start : start + width] for start in range(0, len(data), width)]
        assert coloured(spans(steps, decode)).plain == text
    assert spans([[*b"a"], [*b"bc"], [*b"de\xff"]], decode) == [
        Span("a", drafted=False),
        Span("b", drafted=True),
        Span("c", drafted=False),
        Span("de", drafted=True),
        Span("\N{REPLACEMENT CHARACTER}", drafted=False),
    ]
