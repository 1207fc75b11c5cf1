from vllm_adaptive_tree.report.table import Row, cells, remark
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


def test_table_rows() -> None:
    plain = Row("no speculation", 1.0, 0.0, 1234.4, 1.0, True)
    tree = Row("OPT-Tree of 25", 3.456, 24.96, 900.0, 0.729, False)
    assert cells(plain) == ("no speculation", "1.00", "0.0", "1,234", "1.00", "yes")
    assert cells(tree) == ("OPT-Tree of 25", "3.46", "25.0", "900", "0.73", "no")
    assert remark([plain]) is None
    assert "OPT-Tree of 25." in (remark([plain, tree]) or "")
